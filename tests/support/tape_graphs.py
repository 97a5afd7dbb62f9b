"""A stand-in for device graphs on a CPU: it records the operators of a capture and runs them again at replay.

What a graph promises holds here too: replay runs no Python of the captured code, reads and writes the tensors of the
capture, and cannot contain an operator whose result depends on data that the host would have to read. What the
device adds (memory reuse within a pool, streams) is only written down, in `Log`. On a machine with a GPU the graphs
are the device's own, and only written down.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import vllm.compilation.breakable_cudagraph as breakable
import vllm.v1.worker.gpu.cudagraph_utils as cudagraph_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.platforms import current_platform

_READS_BACK = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "item", "equal"}


@dataclass
class Log:
    """What happened, in order."""

    events: list[str] = field(default_factory=list)
    """``stream``: a capture stream was entered; ``begin``, ``end``: of a piece; ``replay``: of a piece."""
    pools: set[Any] = field(default_factory=set)
    pool: Any = (0, 77)
    """vLLM's graph pool, or what stands for it."""
    keeps_pool: Any = None
    outside: int = 0
    """Captures that began outside a capture stream."""

    def count(self, event: str) -> int:
        return self.events.count(event)


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: list[Any]) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name in _READS_BACK:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.tape.append((func, args, kwargs, out))
        return out


def make_graph_class(log: Log) -> type:
    """A class that takes the place of ``torch.cuda.CUDAGraph`` (``torch.npu.NPUGraph``) and writes into ``log``."""

    class TapeGraph:
        def __init__(self) -> None:
            self.tape: list[Any] = []

        def capture_begin(self, pool: Any = None, **_: Any) -> None:
            log.events.append("begin")
            log.pools.add(pool)
            log.outside += log.count("stream") == log.count("stream end")
            self._recorder = _Recorder(self.tape)
            self._recorder.__enter__()

        def capture_end(self) -> None:
            self._recorder.__exit__(None, None, None)
            log.events.append("end")

        def replay(self) -> None:
            log.events.append("replay")
            for func, args, kwargs, out in self.tape:
                again = func(*args, **kwargs)
                for recorded, new in zip(tree_leaves(out), tree_leaves(again)):
                    # A view, or an operator that wrote in place, has renewed the recorded tensor already.
                    if isinstance(recorded, torch.Tensor) and recorded.data_ptr() != new.data_ptr():
                        recorded.copy_(new)

    return TapeGraph


def make_logged_class(log: Log) -> type:
    """The device's own graphs, written down in ``log``."""

    class LoggedGraph(torch.cuda.CUDAGraph):
        def capture_begin(self, pool: Any = None, **kwargs: Any) -> None:
            log.events.append("begin")
            log.pools.add(pool)
            log.outside += log.count("stream") == log.count("stream end")
            super().capture_begin(pool=pool, **kwargs)

        def capture_end(self) -> None:
            super().capture_end()
            log.events.append("end")

        def replay(self) -> None:
            log.events.append("replay")
            super().replay()

    return LoggedGraph


@contextlib.contextmanager
def graph_stream() -> Iterator[Any]:
    """A stream that may be captured, where there are streams."""
    if not torch.cuda.is_available():
        yield object()
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as stream:
        yield stream
    torch.cuda.synchronize()


def install(monkeypatch: Any) -> Log:
    """Let vLLM's managers and wrappers capture on this machine; undone with ``monkeypatch``."""
    log = Log()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        # A pool whose graphs are all gone cannot be captured into again, so every test has its own, and one graph that
        # stays; a server has the model's.
        log.pool = torch.cuda.graph_pool_handle()
        one, log.keeps_pool = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
        with graph_stream():
            log.keeps_pool.capture_begin(pool=log.pool)
            one.add_(1)
            log.keeps_pool.capture_end()

    @contextlib.contextmanager
    def graph_capture(device: Any) -> Iterator[Any]:
        log.events.append("stream")
        with graph_stream() as stream:
            yield SimpleNamespace(stream=stream)
        log.events.append("stream end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", make_logged_class(log) if on_gpu else make_graph_class(log))
    monkeypatch.setattr(cudagraph_utils, "graph_capture", graph_capture)
    # vLLM's own progress bar and process groups are not there without an engine.
    monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda _: log.pool, raising=False)
    monkeypatch.setattr(breakable.BreakableCUDAGraphCapture, "_tls", threading.local())
    if on_gpu:
        return log
    monkeypatch.setattr(type(current_platform), "graph_pool_handle", lambda _: (0, 78), raising=False)
    monkeypatch.setattr(breakable, "weak_ref_tensor", lambda tensor: tensor)
    monkeypatch.setattr(breakable, "weak_ref_tensors", lambda tensors: tensors)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", classmethod(lambda _: True))
    return log
