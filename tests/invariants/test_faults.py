"""Faults that people met around decoder replay, and the test that makes each impossible here.

| fault | what happened elsewhere | what shows that it cannot happen |
|---|---|---|
| 1 | one prompt-logprobs request stops the server | `test_invariants.test_keeps_every_row_inside_a_trimmed_batch`, \
`test_prompt_logprobs_beside_trimmed_prompts_through_the_state`; through the engine: the demo's case |
| 2 | a mask of absolute positions on a sub-batch | `test_invariants.test_odd_lengths`, \
`test_negative_controls.test_masks_from_absolute_positions_on_a_sub_batch` |
| 3 | the first replay query reads below its start | `test_invariants.test_odd_lengths` on poisoned pages, \
`test_negative_controls.test_late_window_that_starts_at_the_replay_start` |
| 4 | window KV with holes published to the prefix cache | `test_window_pages_are_never_cacheable_under_replay`, \
`tests.unit.test_support` gate ``prefix-cache`` |
| 5 | KV objects of both kinds in one external store | `tests.unit.test_support` gate ``kv-connector`` |
| 6 | the switch is on and nothing trims | `test_rows_drop_and_are_counted`, \
`test_a_worker_hands_its_counters_out`, `tests.unit.test_stats` (the warning) |
| 7 | short steps run in full while the log says "on" | `test_no_chunk_is_too_short_under_final`, \
`test_a_step_in_full_is_counted_with_its_reason` |
| 8 | hidden-state export reads trimmed rows | `test_who_reads_every_row_turns_replay_off`, \
`tests.unit.test_support` gates ``pooling``, ``routed-experts`` |
| 9 | resumed requests lose their replay start | `test_a_resumed_request_keeps_its_replay_start`, `test_schedules` |
| 12 | padding writes into block 0 | `test_invariants.test_padding_of_the_replay_batch`, \
`test_negative_controls.test_padding_that_writes_a_slot`, `test_schedules` |
| 13 | capture reads the previous step's slot mappings | `test_capture_and_graphs_see_no_earlier_batch`, \
`tests.graphs` (replay graphs are captured on dummy slots) |
| 23 | ranks post tensors of different shapes | `tests.unit.test_agreement`, \
`test_one_shape_is_posted_whatever_the_batch` |
| 24 | an idle rank decides from stale slots | `test_an_idle_rank_posts_nothing_whatever_its_slots_hold`, \
`tests.engine.test_data_parallel` |
| 28 | device boundaries differ from the host's | `tests.unit.test_batch.test_fill_equals_numpy`, \
`test_negative_controls.test_boundaries_of_the_host`, `test_schedules` |
| 31 | grids of 0 programs, or too large | `test_a_step_without_kept_rows_launches_nothing`, \
`test_every_grid_is_one_dimensional_and_small` |
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.worker_base import WorkerBase

from tests.invariants.support import (
    CHUNK,
    FINAL,
    OFF,
    check_replay,
    counted,
    final_oracle,
    run_prompt,
)
from tests.reference.test_model_vs_oracle import cacheable_pages, check
from tests.support.stepper import Stepper
from vllm_ascend_replay import stats
from vllm_ascend_replay.batch import ReplayBatch
from vllm_ascend_replay.reference.config import write_model
from vllm_ascend_replay.support import GATES, Situation

POLICIES = pytest.mark.parametrize("settings", [FINAL, CHUNK], ids=["final", "chunk"])


@pytest.fixture(autouse=True)
def fresh_counters():
    stats.reset()
    yield
    stats.reset()


@POLICIES
def test_prompt_logprobs_beside_trimmed_prompts_through_the_state(make_small, tokens, settings):
    """Fault 1: in every step of its prefill, whichever chunk it is in."""
    stepper, oracle = make_small(settings=settings)
    reads = stepper.add(tokens(40), prompt_logprobs=True)
    prompts = [stepper.add(tokens(40, seed=n)) for n in range(1, 5)]
    for prompt in prompts:
        stepper.step([(reads, 10), (prompt, 40)])
    check(reads, oracle.run(reads.tokens))
    assert all(prompt.kept.sum() == 8 for prompt in prompts)


def test_window_pages_are_never_cacheable_under_replay(make_small):
    """Fault 4: the late layers' pages have holes."""
    stepper, _ = make_small(settings=FINAL)
    assert stepper.state.replay_tail is not None
    window_groups = 0
    for group in stepper.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(getattr(spec, "first_spec", spec), SlidingWindowMLASpec):
            window_groups += 1
            assert not spec.prefix_cacheable
    assert window_groups


def test_rows_drop_and_are_counted(make_small, tokens):
    """Fault 6: what the counters say is what the layers ran."""
    stepper, _ = make_small(settings=FINAL)
    ran = []
    handle = stepper.model.layers[-1].register_forward_pre_hook(lambda _, args: ran.append(len(args[0])))
    try:
        request = stepper.add(tokens(60), prompt_len=57)
        run_prompt(stepper, request, [20, 30])
    finally:
        handle.remove()
    # Steps: 20 rows, none kept; 30 rows, 1 kept; 7 rows, all kept; three decodes.
    assert ran == [1, 7, 1, 1, 1]
    counters = stats.snapshot()
    assert (counters["rows_in"], counters["rows_kept"]) == (60, sum(ran))
    assert (counters["steps"], counters["replay_steps"], counters["skipped_steps"]) == (6, 2, 1)


def test_a_worker_hands_its_counters_out(tmp_path, monkeypatch):
    """Fault 6: `collective_rpc("ascend_replay_stats")` answers wherever replay is on."""
    monkeypatch.delattr(WorkerBase, "ascend_replay_stats", raising=False)
    directory = write_model(tmp_path / "model", "tiny", compute_dtype="float64")
    Stepper(directory, settings=OFF)
    assert not hasattr(WorkerBase, "ascend_replay_stats")
    Stepper(directory, settings=FINAL)
    stats.current().count_full(3)
    assert WorkerBase.ascend_replay_stats(None) == stats.snapshot()
    assert stats.snapshot()["rows_in"] == 3


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_no_chunk_is_too_short_under_final(make_small, tokens, size):
    """Fault 7: no threshold; every step of a bounded prompt is trimmed or skipped."""
    stepper, _ = make_small(settings=FINAL)
    request = stepper.add(tokens(40))
    run_prompt(stepper, request, [size] * (39 // size))
    counters = stats.snapshot()
    assert counters["rows_kept"] == request.kept.sum() == 8
    assert counters["full_steps_by_reason"] == {}
    assert counters["skipped_steps"] == 32 // size


def test_a_step_in_full_is_counted_with_its_reason(make_small, tokens):
    """Fault 7: a prompt of a window, and ``chunk`` on a chunk of a window, say that they ran in full."""
    for settings, tokens_of_prompt in ((FINAL, 8), (CHUNK, 16)):
        stats.reset()
        stepper, _ = make_small(settings=settings)
        run_prompt(stepper, stepper.add(tokens(tokens_of_prompt)), [8] * (tokens_of_prompt // 8 - 1))
        counters = stats.snapshot()
        assert counters["rows_kept"] == counters["rows_in"] == tokens_of_prompt
        assert counters["full_steps_by_reason"] == {"no prompt of the step is bounded": tokens_of_prompt // 8}


@pytest.mark.parametrize("method", ["extract_hidden_states", "eagle3", "dspark", "draft_model"])
def test_who_reads_every_row_turns_replay_off(make_small, method):
    """Fault 8: hidden-state extraction and drafters that read the prompt's rows are gated by name."""
    stepper, _ = make_small(settings=FINAL)
    config = stepper.vllm_config
    fake = SimpleNamespace(
        **{
            name: getattr(config, name)
            for name in ("model_config", "parallel_config", "cache_config", "compilation_config", "lora_config")
        },
        kv_transfer_config=None,
        use_v2_model_runner=True,
        speculative_config=SimpleNamespace(method=method),
    )
    situation = Situation(fake, stepper.model, None, stepper.state.replay_settings)
    (gate,) = [gate for gate in GATES if gate.name == "drafter"]
    assert method in gate.reason.format(found=gate.found(situation))


@POLICIES
def test_a_resumed_request_keeps_its_replay_start(make_small, tokens, settings):
    """Fault 9: after a preemption a hit is replayed again, cached pages stay, and rows are the oracle's."""
    stepper, oracle = make_small(settings=settings)
    donor = stepper.add(tokens(40))
    stepper.run(donor, 40)
    hit = 24
    before = cacheable_pages(stepper, donor, hit)
    request = stepper.add(donor.tokens[:hit] + tokens(30, seed=1), prompt_len=45, donor=donor, hit=hit)
    stepper.run(request, request.prefill_len - request.computed, 1, 1)
    stepper.preempt(request)
    request.ran[:] = request.kept[:] = False
    # Its place held another request's start in between.
    other = stepper.add(tokens(20, seed=2))
    stepper.run(other, 20)
    stepper.resume(request, donor=donor, hit=hit)
    assert request.replay_start == hit - 8
    assert stepper.state.replay_starts_np[request.index] == hit - 8
    assert request.prefill_len == 47
    stepper.run(request, 47 - request.computed)
    stepper.run(request, *[1] * request.left)
    for pages, old in zip(cacheable_pages(stepper, request, hit), before):
        assert torch.equal(pages, old)
    # One chunk: both policies keep the last window of it.
    assert request.kept.sum() == 8 + 7
    want = final_oracle(stepper, oracle, request, hit=hit, donor=oracle.run(donor.tokens).sources)
    check_replay(request, want, stepper.model.cut)


def test_a_place_that_is_used_again_forgets_its_last_request(make_small, tokens):
    """Fault 9 the other way round: a cold request in the place of a hit or of one that kept every row."""
    stepper, oracle = make_small(settings=FINAL)
    donor = stepper.add(tokens(40))
    stepper.run(donor, 40)
    for kwargs in (dict(donor=donor, hit=24), dict(prompt_logprobs=True)):
        first = stepper.add(donor.tokens[:24] + tokens(10, seed=1), **kwargs)
        place = first.index
        stepper.run(first)
        stepper.finish(first)
        stepper.free_indices.sort(key=lambda index, place=place: index != place)
        cold = stepper.add(tokens(50, seed=3))
        assert cold.index == place
        stepper.run(cold)
        check_replay(cold, final_oracle(stepper, oracle, cold), stepper.model.cut)
        stepper.finish(cold)


def dummy_batch(stepper, num_reqs: int, num_tokens: int) -> InputBatch:
    return InputBatch.make_dummy(num_reqs, num_tokens, InputBuffers(8, 256, torch.device("cpu")))


def prepare(stepper, batch, mode=CUDAGraphMode.NONE, for_capture=False) -> None:
    groups = len(stepper.block_sizes)
    tables = tuple(torch.zeros(batch.num_reqs, 4, dtype=torch.int32) for _ in range(groups))
    slots = torch.full((groups, batch.num_tokens_after_padding), -1, dtype=torch.int64)
    stepper.state._prepare_replay(
        batch, mode, tables, slots, stepper.attn_groups, stepper.kv_cache_config, for_capture=for_capture
    )


@pytest.mark.parametrize(
    ("mode", "for_capture"),
    [(CUDAGraphMode.NONE, False), (CUDAGraphMode.FULL, False), (CUDAGraphMode.FULL, True), (CUDAGraphMode.NONE, True)],
)
def test_capture_and_graphs_see_no_earlier_batch(make_small, mode, for_capture):
    """Fault 13: whatever a step left behind is gone before anything is captured or run."""
    stepper, _ = make_small(settings=FINAL)
    stepper.model.tail.batch = ReplayBatch(kept=None)
    prepare(stepper, dummy_batch(stepper, 2, 2), mode, for_capture)
    assert stepper.model.tail.batch is None


@pytest.fixture
def two_ranks(make_small, monkeypatch):
    """A state that believes in a second rank, and what it posts."""
    stepper, _ = make_small(settings=FINAL)
    posted = []

    def all_reduce(tensor, group=None):
        posted.append(tensor.clone())

    parallel = SimpleNamespace(data_parallel_size=2, data_parallel_rank=1)
    monkeypatch.setattr(stepper.state, "vllm_config", SimpleNamespace(parallel_config=parallel))
    import vllm_ascend_replay.model_state as module

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(module, "get_dp_group", lambda: SimpleNamespace(cpu_group=None))
    return stepper, posted


def test_an_idle_rank_posts_nothing_whatever_its_slots_hold(two_ranks):
    """Fault 24: a dummy batch of rows whose places once held hits and prompts that keep every row."""
    stepper, posted = two_ranks
    stepper.state.replay_starts_np[:] = 77
    stepper.state.replay_keeps_rows_np[:] = True
    try:
        for num_reqs, num_tokens in ((1, 1), (4, 4), (2, 30)):
            prepare(stepper, dummy_batch(stepper, num_reqs, num_tokens))
    finally:
        stepper.state.replay_starts_np[:] = 0
        stepper.state.replay_keeps_rows_np[:] = False
    assert [tensor.tolist() for tensor in posted] == [[[0, 0], [0, 0]]] * 3


def test_one_shape_is_posted_whatever_the_batch(two_ranks, tokens, monkeypatch):
    """Fault 23: dummies, decodes, prompts with and without kept rows; one collective a step, in one place."""
    stepper, posted = two_ranks
    # Only what is posted matters here; the batch itself would need a real group.
    monkeypatch.setattr(stepper.state, "_build_replay", lambda *_: ReplayBatch(kept=None))
    prepare(stepper, dummy_batch(stepper, 3, 3))
    request, short = stepper.add(tokens(50), prompt_len=47), stepper.add(tokens(9, seed=1), prompt_len=7)
    want = [[0, 0]]

    def step(*work):
        batch, tables, slots = inputs(stepper, work)
        stepper.state._prepare_replay(
            batch, CUDAGraphMode.NONE, tables, slots, stepper.attn_groups, stepper.kv_cache_config
        )
        for each, count in work:
            each.computed += count

    step((request, 20))
    step((short, 7))
    step((request, 25), (short, 1))
    step((request, 2))
    step((request, 1), (short, 1))
    want += [[1, 0], [0, 7], [1, 1 + 6], [1, 2], [0, 2]]
    assert [[int(t[0, 1]), int(t[1, 1])] for t in posted] == want
    assert {(t.shape, t.dtype) for t in posted} == {(torch.Size([2, 2]), torch.int32)}
    # Nothing but this rank's column is filled in.
    assert not any(t[:, 0].any() for t in posted)


def inputs(stepper, work):
    """The inputs of a step, as `Stepper.step` makes them."""
    requests, lens = [r for r, _ in work], np.array([n for _, n in work], dtype=np.int32)
    for request, count in work:
        stepper._allocate_up_to(request, request.computed + count)
    return stepper._inputs(requests, lens, lens, 0)


def test_a_step_without_kept_rows_launches_nothing(make_small, tokens):
    """Fault 31: zero rows are no grid of zero programs, and no upload."""
    stepper, _ = make_small(settings=FINAL)
    stepper.run(stepper.add(tokens(3)))
    request = stepper.add(tokens(60))
    with counted(stepper) as work:
        assert stepper.step([(request, 30)]).skipped
    assert (work.launches, work.uploads) == ([], 0)


@POLICIES
def test_every_grid_is_one_dimensional_and_small(make_small, tokens, settings):
    """Fault 31."""
    stepper, _ = make_small(settings=settings)
    donor = stepper.add(tokens(60))
    with counted(stepper) as work:
        run_prompt(stepper, donor, [1, 20, 9])
        hit = stepper.add(donor.tokens[:32] + tokens(20, seed=1), donor=donor, hit=32)
        stepper.step([(hit, 3)])
        stepper.step([(hit, hit.left), *((stepper.add(tokens(9, seed=n)), 9) for n in range(2, 5))])
    assert {name for name, _ in work.launches} == {
        "_gather_batch_kernel",
        "_gather_states_kernel",
        "_scatter_rows_kernel",
        "_pad_replayed_slots_kernel",
    }
    for name, grid in work.launches:
        assert 1 <= grid[0] <= 65535, name
        assert set(grid[1:]) <= {1}, name


def test_replay_off_counts_nothing(make_small, tokens):
    """The control of the counters."""
    stepper, _ = make_small(settings=OFF)
    run_prompt(stepper, stepper.add(tokens(60)), [20, 30])
    assert stats.snapshot()["steps"] == 0
