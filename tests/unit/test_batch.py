"""The replay batch against NumPy: compaction, device boundaries, padding, and vLLM's own kept rows under ``chunk``."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from vllm_ascend_replay import kernels
from vllm_ascend_replay.batch import ReplayBuffers, shrink_input_batch
from vllm_ascend_replay.plan import empty_plan, plan_replay

DEVICE = torch.device("cpu")
GROUPS, MAX_REQS, MAX_TOKENS = 3, 16, 2048
POISON = -777


def poisoned():
    buffers = ReplayBuffers(MAX_REQS, MAX_TOKENS, GROUPS, DEVICE)
    for name in ("rows", "boundaries", "positions", "slot_mappings", "seq_lens"):
        getattr(buffers, name).fill_(POISON)
    return buffers


@st.composite
def batches(draw):
    n = draw(st.integers(1, 7))
    window = draw(st.sampled_from([8, 128]))
    step = dict(
        num_computed=[], query_lens=[], prefill_lens=[], is_prefilling=[], keeps_rows=[], replay_start=[], window=window
    )
    for _ in range(n):
        prefilling = draw(st.booleans())
        query = draw(st.integers(1, 200)) if prefilling else draw(st.integers(1, 4))
        computed = draw(st.integers(0, 300))
        step["num_computed"].append(computed)
        step["query_lens"].append(query)
        step["prefill_lens"].append(
            computed + query + draw(st.sampled_from([0, 0, 5, 400])) if prefilling else computed
        )
        step["is_prefilling"].append(prefilling)
        step["keeps_rows"].append(draw(st.integers(0, 5)) == 0)
        step["replay_start"].append(0)
    return step, draw(st.sampled_from(["final", "chunk"])), draw(st.integers(0, 9)), draw(st.integers(0, 2**31))


@settings(max_examples=60)
@given(batches())
def test_fill_equals_numpy(drawn):
    step, policy, padding, seed = drawn
    plan = plan_replay(**step, policy=policy)
    rng = np.random.default_rng(seed)
    query = np.array(step["query_lens"])
    # The device may run fewer rows of a decode than the host planned (adaptive verification).
    cut = np.where(step["is_prefilling"], 0, rng.integers(0, 4, len(query)))
    device_query = np.maximum(query - cut, 1)
    cut = query - device_query
    qsl = np.concatenate([[0], np.cumsum(device_query)]).astype(np.int32)
    total = int(query.sum())
    positions = torch.from_numpy(rng.integers(0, 10**6, total))
    slots = torch.from_numpy(rng.integers(0, 2**62, (GROUPS, total)))
    num_padded = max(plan.num_rows, 1) + padding
    kept = poisoned().fill(
        plan,
        query_start_loc=torch.from_numpy(qsl),
        positions=positions,
        slot_mappings=slots,
        replay_start=np.array(step["replay_start"], dtype=np.int32),
        num_padded=num_padded,
    )
    rows = np.concatenate(
        [np.arange(end - (k - c), end) for end, k, c in zip(qsl[1:], plan.kept_lens, cut)] + [np.zeros(0)]
    ).astype(np.int64)
    real = len(rows)
    assert kept.rows.tolist() == rows.tolist() + [kernels.PAD_ROW] * (num_padded - real)
    assert kept.positions[:real].tolist() == positions[rows].tolist()
    assert kept.positions[real:].tolist() == [0] * (num_padded - real)
    assert torch.equal(kept.slot_mappings[:, :real], slots[:, rows])
    assert (kept.slot_mappings[:, real:] == kernels.PAD_SLOT).all()
    if plan.num_rows:
        lens = (plan.kept_lens - cut)[kept.requests]
        assert kept.boundaries.tolist() == [0, *np.cumsum(lens).tolist()]
        assert kept.kv_start.tolist() == plan.kv_start[kept.requests].tolist()
    else:
        assert kept.boundaries.tolist() == [0, 1]
        assert kept.kv_start.tolist() == [0]

    # States out and back: kept rows unchanged, everything else zero, nothing left unwritten.
    states = [torch.from_numpy(rng.standard_normal((total, 2, 5))), torch.arange(total, dtype=torch.int32)]
    gathered = kept.gather(states)
    for state, compact in zip(states, gathered):
        assert torch.equal(compact[:real], state[rows])
        assert not compact[real:].any()
    (back,) = kept.scatter([gathered[0].flatten(1)], total)
    expected = torch.zeros(total, 10, dtype=torch.float64)
    expected[rows] = states[0].flatten(1)[rows]
    assert torch.equal(back, expected)


def make_input_batch(step, policy_rows=None):
    """A real vLLM InputBatch of the step."""
    n, query = len(step["query_lens"]), np.array(step["query_lens"], dtype=np.int32)
    buffers = InputBuffers(MAX_REQS, MAX_TOKENS, DEVICE)
    batch = InputBatch.make_dummy(n, int(query.sum()), buffers)
    qsl = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
    computed = np.array(step["num_computed"], dtype=np.int32)
    positions = np.concatenate([np.arange(c, c + q) for c, q in zip(computed, query)])
    batch.query_start_loc_np, batch.query_start_loc = qsl, torch.from_numpy(qsl)
    batch.seq_lens = torch.from_numpy(computed + query)
    batch.seq_lens_cpu_upper_bound = torch.from_numpy(computed + query)
    batch.positions = torch.from_numpy(positions)
    batch.num_scheduled_tokens = query
    batch.num_computed_tokens_np = computed
    prefill = np.array(step["prefill_lens"], dtype=np.int32)
    batch.prefill_len_np = prefill
    batch.num_computed_prefill_tokens_np = np.minimum(computed, prefill)
    batch.is_prefilling_np = np.array(step["is_prefilling"])
    batch.has_prefill = bool(batch.is_prefilling_np.any())
    return batch


STEP = dict(
    num_computed=[0, 40, 0, 7],
    query_lens=[20, 3, 30, 2],
    prefill_lens=[90, 40, 30, 300],
    is_prefilling=[True, False, True, True],
    keeps_rows=[False] * 4,
    replay_start=[0] * 4,
    window=8,
)


def test_the_shrunk_batch_holds_only_requests_with_kept_rows():
    plan = plan_replay(**STEP)
    assert plan.kept_lens.tolist() == [0, 3, 8, 0]
    batch = make_input_batch(STEP)
    buffers = poisoned()
    kept = buffers.fill(
        plan,
        query_start_loc=batch.query_start_loc,
        positions=batch.positions,
        slot_mappings=torch.zeros(GROUPS, 55, dtype=torch.int64),
        replay_start=np.zeros(4, dtype=np.int32),
        num_padded=16,
    )
    tables = tuple(torch.arange(4 * w, dtype=torch.int32).view(4, w) for w in (3, 5, 2))
    lens, kept_tables = buffers.select_requests(kept, batch.seq_lens, tables, 4)
    small = shrink_input_batch(batch, kept, lens)
    assert small.num_reqs == small.num_reqs_after_padding == len(small.req_ids) == 2
    assert (small.num_tokens, small.num_tokens_after_padding) == (11, 16)
    assert small.query_start_loc_np.tolist() == small.query_start_loc.tolist() == [0, 3, 11]
    assert small.seq_lens.tolist() == small.seq_lens_cpu_upper_bound.tolist() == [43, 30]
    assert small.is_prefilling_np.tolist() == [False, True]
    assert small.num_scheduled_tokens.tolist() == [3, 8]
    assert small.positions[:11].tolist() == [40, 41, 42, *range(22, 30)]
    for table, full in zip(kept_tables, tables):
        assert torch.equal(table, full[[1, 2]])


def test_a_rank_without_kept_rows_gets_one_padding_row():
    batch, plan = make_input_batch(STEP), empty_plan(STEP["query_lens"])
    buffers = poisoned()
    kept = buffers.fill(
        plan,
        query_start_loc=batch.query_start_loc,
        positions=batch.positions,
        slot_mappings=torch.zeros(GROUPS, 55, dtype=torch.int64),
        replay_start=np.array([5, 5, 5, 5], dtype=np.int32),
        num_padded=1,
    )
    lens, tables = buffers.select_requests(kept, batch.seq_lens, (torch.ones(4, 6, dtype=torch.int32),), 4)
    small = shrink_input_batch(batch, kept, lens)
    assert (kept.rows.tolist(), kept.positions.tolist()) == ([kernels.PAD_ROW], [0])
    assert kept.slot_mappings.tolist() == [[kernels.PAD_SLOT]] * GROUPS
    assert (kept.kv_start.tolist(), kept.replay_start.tolist()) == ([0], [0])
    assert (small.num_reqs, small.num_tokens, small.seq_lens.tolist()) == (1, 1, [1])
    assert small.query_start_loc_np.tolist() == small.query_start_loc.tolist() == [0, 1]
    assert tables[0].shape == (1, 6)
    (back,) = kept.scatter([torch.full((1, 4), 3.0)], 55)
    assert back.shape == (55, 4)
    assert not back.any()


def test_buffers_are_reused_and_views_do_not_leak_an_earlier_step():
    buffers = poisoned()
    addresses = [t.data_ptr() for t in (buffers.rows, buffers.positions, buffers.slot_mappings)]
    for query in (600, 30, 1, 257):
        step = {**STEP, "query_lens": [query, 1, 1, 1], "prefill_lens": [query, 40, 1, 300]}
        plan = plan_replay(**step)
        batch = make_input_batch(step)
        kept = buffers.fill(
            plan,
            query_start_loc=batch.query_start_loc,
            positions=batch.positions,
            slot_mappings=torch.arange(GROUPS * (query + 3)).view(GROUPS, -1),
            replay_start=np.zeros(4, dtype=np.int32),
            num_padded=plan.num_rows,
        )
        assert [t.data_ptr() for t in (kept.rows, kept.positions, kept.slot_mappings)] == addresses
        assert (kept.rows >= 0).all()


@pytest.mark.parametrize("seed", range(12))
def test_chunk_policy_equals_vllms_own_kept_rows(seed):
    """vLLM's DeepseekV41ModelState (NVIDIA) prepares the same rows and window starts for the same batch."""
    import vllm.models.deepseek_v41.nvidia.model_state as state_module

    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    query = rng.integers(1, 300, n)
    computed = rng.integers(0, 400, n)
    prefilling = rng.random(n) < 0.7
    query[~prefilling] = 1
    starts = np.where(prefilling & (rng.random(n) < 0.4), computed // 2, 0).astype(np.int32)
    step = dict(
        num_computed=computed,
        query_lens=query,
        prefill_lens=np.where(prefilling, computed + query, computed),
        is_prefilling=prefilling,
        keeps_rows=rng.random(n) < 0.2,
        replay_start=starts,
        window=128,
    )
    batch = make_input_batch(step)
    slots = torch.from_numpy(rng.integers(0, 2**40, (GROUPS, int(query.sum()))))

    theirs = object.__new__(state_module.DeepseekV41ModelState)
    theirs.decoder_replay_layers = type("Layers", (), {"window": 128})()
    theirs._dropped_before = state_module.UvaBufferPool(MAX_REQS + 1, torch.int32)
    theirs._kept_rows = torch.zeros(MAX_TOKENS * 2, dtype=torch.int64)
    theirs._kept_positions = torch.zeros(MAX_TOKENS * 2, dtype=torch.int64)
    theirs._kept_query_start_loc = torch.zeros(MAX_REQS + 1, dtype=torch.int32)
    theirs._kept_kv_start = torch.zeros(MAX_REQS, dtype=torch.int32)
    theirs._kept_slot_mappings = torch.zeros(GROUPS, MAX_TOKENS * 2, dtype=torch.int64)
    kept_lens = np.where(step["keeps_rows"], query, np.minimum(query, 128))
    total = int(kept_lens.sum())
    their_batch, their_slots = theirs._kept_input_batch(batch, slots, torch.from_numpy(starts), kept_lens, total)

    plan = plan_replay(**step, policy="chunk")
    buffers = ReplayBuffers(MAX_REQS, MAX_TOKENS * 2, GROUPS, DEVICE)
    kept = buffers.fill(
        plan,
        query_start_loc=batch.query_start_loc,
        positions=batch.positions,
        slot_mappings=slots,
        replay_start=starts,
        num_padded=plan.num_rows,
    )
    assert kept.rows.tolist() == theirs._kept_rows[:total].tolist()
    assert torch.equal(kept.slot_mappings, their_slots[:, :total])
    assert kept.positions.tolist() == their_batch.positions.tolist()
    assert kept.boundaries.tolist() == their_batch.query_start_loc.tolist()
    assert kept.kv_start.tolist() == theirs._kept_kv_start[:n].tolist()
