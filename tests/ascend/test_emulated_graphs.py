"""The recorded graphs that the other tests trust: `tests/npu_emulator/graphs.py`."""

import contextlib

import pytest
import torch
import triton
import triton.language as tl

from tests.npu_emulator.graphs import Graph, kernel


@contextlib.contextmanager
def capture(pool=None):
    graph = Graph()
    graph.capture_begin(pool=pool or object())
    try:
        yield graph
    finally:
        graph.capture_end()


def test_replay_computes_again_on_the_same_tensors():
    x, seen = torch.zeros(3), []
    with capture() as graph:
        y = (x + 1) * 2
        seen.append(y)
        x.add_(10)
    x.fill_(4)
    graph.replay()
    assert (y.tolist(), x.tolist()) == ([10] * 3, [14] * 3)
    # Python between the operators belongs to the capture.
    assert len(seen) == 1


def test_a_kernel_is_one_launch_whatever_python_it_is():
    calls = []

    @kernel
    def positive(x):
        calls.append(int((x > 0).sum()))  # a device could not read this back; a kernel need not
        return x.clamp_min(0)

    x = torch.tensor([-1.0, 2.0])
    with capture() as graph:
        y = positive(x)
    x.copy_(torch.tensor([3.0, 4.0]))
    graph.replay()
    assert (y.tolist(), calls, len(graph.tape)) == ([3, 4], [1, 2], 1)


def test_a_tensor_that_moved_is_not_followed():
    held = {"x": torch.ones(2)}
    with capture() as graph:
        y = held["x"] + 1
    held["x"] = torch.full((2,), 9.0)
    graph.replay()
    assert y.tolist() == [2, 2]


def test_graphs_of_one_pool_share_memory():
    x = torch.ones(2)
    with capture(pool := object()) as first:
        y = x + 1
    with capture(pool):
        pass
    assert y.isnan().all()
    first.replay()
    assert y.tolist() == [2, 2]
    with capture():
        pass
    assert y.tolist() == [2, 2]


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero, bool])
def test_reading_back_raises(read):
    x = torch.ones(1)
    with capture(), pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        read(x)
    read(x)


@triton.jit
def _one(x):
    tl.store(x, 1.0)


def test_what_cannot_be_recorded_raises():
    x = torch.zeros(1)
    with capture(), pytest.raises(RuntimeError, match="cannot record the Triton kernel"):
        _one[(1,)](x)
    _one[(1,)](x)
    assert x.item() == 1
