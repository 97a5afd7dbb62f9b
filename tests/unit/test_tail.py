"""The tail on layers that record what they were given."""

import contextlib

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, ForwardContext, get_forward_context, override_forward_context

from vllm_ascend_replay.batch import ReplayBatch, ReplayBuffers
from vllm_ascend_replay.plan import plan_replay
from vllm_ascend_replay.tail import ReplayTail, nested_context, replay_context

T, HC, H = 30, 2, 3


class Layer:
    """Adds its number to the streams, counts MoE layers as torch < 2.11 does, and remembers its rows."""

    def __init__(self, number, log):
        self.number, self.log = number, log

    def __call__(self, positions, streams, pre_mix, input_ids):
        context = get_forward_context()
        self.log.append((self.number, positions.tolist(), context.moe_layer_index, context.attn_metadata))
        context.moe_layer_index += 1
        return streams + self.number, pre_mix * 2

    def write_kv(self, positions, streams, pre_mix):
        self.log.append(("write", positions.tolist()))


def make(aux=()):
    log = []
    return ReplayTail([Layer(i, log) for i in range(6)], cut=3, aux_layers=aux), log


def states():
    return (
        torch.arange(T),
        torch.randint(-50, 50, (T, HC, H)).double(),  # whole numbers: sums are exact
        torch.rand(T, HC),
        torch.arange(100, 100 + T, dtype=torch.int32),
    )


@contextlib.contextmanager
def running(**changes):
    values = dict(no_compile_layers={}, attn_metadata={"outer": 1}, slot_mapping={}, moe_layer_index=3, **changes)
    context = ForwardContext(**values)
    with override_forward_context(context):
        yield context


def kept_rows(query, **changes):
    step = dict(
        num_computed=[0] * len(query),
        query_lens=query,
        prefill_lens=query,
        is_prefilling=[True] * len(query),
        keeps_rows=[False] * len(query),
        replay_start=[0] * len(query),
        window=4,
    )
    plan = plan_replay(**{**step, **changes})
    return ReplayBuffers(8, 64, 1, torch.device("cpu")).fill(
        plan,
        query_start_loc=torch.tensor([0, *np.cumsum(query)], dtype=torch.int32),
        positions=torch.arange(T),
        slot_mappings=torch.zeros(1, T, dtype=torch.int64),
        replay_start=np.zeros(len(query), dtype=np.int32),
        num_padded=max(plan.num_rows, 1),
    )


def test_without_a_batch_every_row_runs():
    tail, log = make(aux=(1, 3, 5))
    positions, streams, pre, ids = states()
    with running() as context:
        out, out_pre = tail(positions, streams, pre, ids)
    assert torch.equal(out, streams + 3 + 4 + 5)
    assert torch.equal(out_pre, pre * 8)
    assert [entry[0] for entry in log] == [3, 4, 5]
    assert all(entry[1] == positions.tolist() for entry in log)
    assert context.moe_layer_index == 6
    early = [torch.zeros(T, H)]
    hidden, aux = tail.finish(out[:, 0], early, T)
    assert torch.equal(hidden, out[:, 0])
    assert torch.equal(aux[1], streams.mean(1))
    assert torch.equal(aux[2], (streams + 7).mean(1))


def test_kept_rows_run_under_their_contexts_and_come_back_compact():
    tail, log = make(aux=(1, 3, 5))
    positions, streams, pre, ids = states()
    kept = kept_rows([20, 10])
    rows = [16, 17, 18, 19, 26, 27, 28, 29]
    tail.batch = ReplayBatch(
        kept, replay_context(kept, {"cut": 1}, {"s": 1}, None), replay_context(kept, {"late": 1}, {"s": 1}, None)
    )
    with running(is_padding=torch.zeros(T, dtype=torch.bool)) as context:
        out, out_pre = tail(positions, streams, pre, ids)
        assert get_forward_context() is context
    assert log[0] == ("write", positions.tolist())
    assert [(number, row, moe) for number, row, moe, _ in log[1:]] == [(3, rows, 3), (4, rows, 4), (5, rows, 5)]
    assert [entry[3] for entry in log[1:]] == [{"cut": 1}, {"late": 1}, {"late": 1}]
    assert context.moe_layer_index == 6  # a fresh context would have restarted it
    assert torch.equal(out, streams[rows] + 12)
    assert torch.equal(out_pre, pre[rows] * 8)
    hidden, aux = tail.finish(out[:, 0], [torch.ones(T, H, dtype=torch.float64)], T)
    expected = torch.zeros(T, H, dtype=torch.float64)
    expected[rows] = out[:, 0]
    assert torch.equal(hidden, expected)
    assert torch.equal(aux[0], torch.ones(T, H, dtype=torch.float64))
    late = torch.zeros(T, H, dtype=torch.float64)
    late[rows] = streams[rows].mean(1)
    assert torch.equal(aux[1], late)


def test_a_step_that_keeps_no_row_runs_no_layer():
    tail, log = make(aux=(4,))
    positions, streams, pre, ids = states()
    tail.batch = ReplayBatch(kept=None)
    with running() as context:
        out, out_pre = tail(positions, streams, pre, ids)
    assert [entry[0] for entry in log] == ["write"]
    assert (out.shape, out_pre.shape) == ((1, HC, H), (1, HC))
    assert context.moe_layer_index == 3
    hidden, aux = tail.finish(torch.full((1, H), float("nan")), [], T)
    assert (hidden.shape, aux[0].shape) == ((T, H), (T, H))
    assert not hidden.any()
    assert not aux[0].any()


def test_a_batch_does_not_outlive_its_forward():
    tail, log = make()
    positions, streams, pre, ids = states()
    tail.batch = ReplayBatch(kept=None)
    with running():
        out, _ = tail(positions, streams, pre, ids)
        tail.finish(out[:, 0], [], T)
        log.clear()
        out, _ = tail(positions, streams, pre, ids)  # e.g. a dummy run that never prepared attention
    assert [entry[0] for entry in log] == [3, 4, 5]
    assert out.shape == streams.shape


def test_the_nested_context_is_a_copy_of_the_running_one():
    with running(additional_kwargs={"platform": 7}) as outer:
        outer.cudagraph_runtime_mode = CUDAGraphMode.FULL
        with nested_context(attn_metadata={"inner": 1}, batch_descriptor=BatchDescriptor(num_tokens=5)) as inner:
            assert get_forward_context() is inner
            assert (inner.additional_kwargs, inner.cudagraph_runtime_mode) == ({"platform": 7}, CUDAGraphMode.NONE)
        assert get_forward_context() is outer
        assert outer.attn_metadata == {"outer": 1}


def test_the_outer_context_returns_after_a_failing_layer():
    def fail(*_):
        raise RuntimeError("layer fault")

    tail = ReplayTail([None] * 6, cut=3, run_layer=fail, write_kv=lambda *_: None)
    kept = kept_rows([20, 10])
    context = replay_context(kept, {}, {}, None)
    tail.batch = ReplayBatch(kept, context, context)
    with running() as outer:
        with pytest.raises(RuntimeError, match="layer fault"):
            tail(*states())
        assert get_forward_context() is outer


def test_padding_rows_are_marked_and_zero():
    tail, _ = make()
    positions, streams, pre, ids = states()
    kept = kept_rows([20, 10], is_prefilling=[True, True])
    padded = ReplayBuffers(8, 64, 1, torch.device("cpu")).fill(
        kept.plan,
        query_start_loc=kept.query_start_loc,
        positions=positions,
        slot_mappings=torch.zeros(1, T, dtype=torch.int64),
        replay_start=np.zeros(2, dtype=np.int32),
        num_padded=11,
    )
    seen = []
    tail.run_layer = lambda layer, p, s, m, i: (seen.append((get_forward_context().is_padding, s)), (s, m))[1]
    tail.batch = ReplayBatch(padded, replay_context(padded, {}, {}, None), replay_context(padded, {}, {}, None))
    with running(is_padding=torch.zeros(T, dtype=torch.bool)):
        out, _ = tail(positions, streams, pre, ids)
    assert seen[0][0].tolist() == [False] * 8 + [True] * 3
    assert not out[8:].any()
    hidden, _ = tail.finish(torch.ones(11, H), [], T)
    assert int(hidden.sum()) == 8 * H


def test_the_first_forward_compiles_the_seam(monkeypatch):
    """What crosses the cut is known in the first forward, a start-up dummy; nothing is left to compile later."""
    from vllm_ascend_replay import kernels

    calls = []
    monkeypatch.setattr(kernels, "warm_up_states", lambda **given: calls.append(given))
    tail, _ = make(aux=(3, 4))
    positions, streams, pre, ids = states()
    for _ in range(2):
        with running():
            out, _ = tail(positions, streams, pre, ids)
            tail.finish(out[:, 0], [], T)
    (given,) = calls
    assert [(s.dtype, s.shape[1:]) for s in given["states"]] == [(s.dtype, s.shape[1:]) for s in (streams, pre, ids)]
    assert [o.shape for o in given["outputs"]] == [(T, H)] * 3
