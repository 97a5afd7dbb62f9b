"""`torch.npu.NPUGraph` on the CPU: records what is launched between capture begin and end, and runs it again at replay.

What a captured graph promises holds here too:

* Replay runs no Python of the captured code. Operators of vLLM and vllm-ascend that are Python (`vllm::*`) are looked
  into at capture; what they found in the forward context then is what replay uses.
* It reads and writes the tensors of the capture, at the addresses of the capture.
* Reading a value back, or a Triton kernel that the recorder cannot see, raises.
* Graphs of one pool share memory: a replay (or capture) overwrites with NaN whatever another capture of the pool had
  allocated, so a tensor that somebody expects to survive shows.

Order is program order. `LOG` tells what happened.
"""

import functools
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS_BACK = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "item", "equal"}


@dataclass
class Log:
    """What graphs did, in order."""

    events: list[str] = field(default_factory=list)
    """`begin`, `end` and `replay` of a graph."""
    captures: list[tuple] = field(default_factory=list)
    """`(stream, pool)` of every capture; the stream is None outside a capture stream."""

    def count(self, event):
        return self.events.count(event)

    def clear(self):
        self.events.clear()
        self.captures.clear()


LOG = Log()


class Recorder(TorchDispatchMode):
    """Writes operators on the tape of the graph that is being captured, if one is."""

    def __init__(self):
        super().__init__()
        self.graph = None
        self.stream = None
        # Python operators on the stack: their breaks end and begin captures, but the mode stays where it is.
        self.depth = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.graph is None:
            return func(*args, **kwargs)
        if func._schema.name in PYTHON_OPERATORS:
            return func(*args, **kwargs)
        if func._schema.name.split("::")[-1] in READS_BACK:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        graph, self.graph = self.graph, None
        try:
            out = func(*args, **kwargs)
        finally:
            self.graph = graph
        graph.record(func, args, kwargs, out)
        return out


RECORDER = Recorder()
PYTHON_OPERATORS: set[str] = set()
"""Operators that are Python functions over other operators, by qualified name."""


def python_operator(name, fn):
    """Makes `fn`, the body of operator `name`, visible to the recorder: what it launches is on the tape, it is not."""
    PYTHON_OPERATORS.add(name)

    @functools.wraps(fn)
    def body(*args, **kwargs):
        if RECORDER.graph is None:
            return fn(*args, **kwargs)
        RECORDER.depth += 1
        try:
            with RECORDER:
                return fn(*args, **kwargs)
        finally:
            RECORDER.depth -= 1

    return body


def kernel(fn):
    """Makes a Python function one kernel to a graph: replay runs it again on the same tensors."""

    @functools.wraps(fn)
    def launch(*args, **kwargs):
        graph = RECORDER.graph
        if graph is None:
            return fn(*args, **kwargs)
        RECORDER.graph = None
        try:
            out = fn(*args, **kwargs)
        finally:
            RECORDER.graph = graph
        graph.record(fn, args, kwargs, out)
        return out

    return launch


class Graph:
    """Stands for `torch.npu.NPUGraph`."""

    _resident: ClassVar[dict] = {}  # pool -> the capture that used its memory last

    def __init__(self, *args, **kwargs):
        self.tape = []

    def capture_begin(self, pool=None, **_):
        if RECORDER.graph is not None:
            raise RuntimeError("a capture is already going on")
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture

        # The pieces of one capture share memory in order; so does nobody else.
        self.owner, self.pool = BreakableCUDAGraphCapture.current() or self, pool
        self.owner.__dict__.setdefault("memory", [])
        self._take_over()
        LOG.events.append("begin")
        LOG.captures.append((RECORDER.stream, pool))
        if not RECORDER.depth:
            RECORDER.__enter__()
        RECORDER.graph = self

    def capture_end(self):
        RECORDER.graph = None
        if not RECORDER.depth:
            RECORDER.__exit__(None, None, None)
        LOG.events.append("end")

    def record(self, fn, args, kwargs, out):
        """One launch: `fn(*args, **kwargs)` gave `out`."""
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.numel() and t.untyped_storage().data_ptr() not in given:
                self.owner.memory.append(t)
        self.tape.append((fn, args, kwargs, out))

    def replay(self):
        LOG.events.append("replay")
        self._take_over()
        with torch.inference_mode():
            for fn, args, kwargs, out in self.tape:
                again = fn(*args, **kwargs)
                for recorded, new in zip(tree_leaves(out), tree_leaves(again)):
                    # A view, or an operator that wrote in place, has renewed the recorded tensor already.
                    if isinstance(recorded, torch.Tensor) and recorded.data_ptr() != new.data_ptr():
                        recorded.copy_(new)

    def _take_over(self):
        """This capture has the pool's memory now; what another one left there is gone."""
        last = self._resident.get(self.pool)
        if last is not None and last is not self.owner:
            with torch.inference_mode():
                for t in last.memory:
                    t.fill_(float("nan") if t.is_floating_point() else True if t.dtype == torch.bool else 1 << 6)
        self._resident[self.pool] = self.owner


class graph:
    """Stands for `torch.npu.graph`: captures its body into one graph, on a stream."""

    def __init__(self, npu_graph, pool=None, stream=None, **_):
        self.graph, self.pool, self.stream = npu_graph, pool, stream

    def __enter__(self):
        self.graph.capture_begin(pool=self.pool)

    def __exit__(self, *exc):
        self.graph.capture_end()


class stream:
    """Stands for `torch.npu.stream`: only captures want to know which one is current."""

    def __init__(self, stream=None):
        self.stream = stream

    def __enter__(self):
        self.before, RECORDER.stream = RECORDER.stream, self.stream
        return self.stream

    def __exit__(self, *exc):
        RECORDER.stream = self.before


def refuse_read_back(func):
    """Raises inside a capture for a method of tensors that hands their values to the host."""
    if is_capturing() and func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu):
        raise RuntimeError(f"operation not permitted when stream is capturing: {func.__name__}")


def is_capturing():
    """Whether a graph is being captured."""
    return RECORDER.graph is not None


def refuse_unseen_kernels():
    """Makes a Triton kernel launched inside a capture raise: the interpreter writes memory behind PyTorch's back."""
    from triton.runtime.interpreter import GridExecutor

    call = GridExecutor.__call__

    @functools.wraps(call)
    def launch(self, *args, **kwargs):
        if is_capturing():
            raise RuntimeError(f"the stand-in for graphs cannot record the Triton kernel {self.fn}")
        return call(self, *args, **kwargs)

    GridExecutor.__call__ = launch
