"""What the tests here share: comparisons with the oracle, and counters of what a step launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from tests.reference.test_model_vs_oracle import TOLERANCE
from tests.support.oracle import Oracle, OracleRun
from tests.support.stepper import Stepper, StepperRequest

DIFFERS = 1e-8
"""Two results that differ by more are not the same; equal ones here agree to 1e-13."""

QUIET = {"ASCEND_REPLAY_LOG_EVERY": "0"}
OFF = {"ASCEND_REPLAY": "0", **QUIET}
FINAL = {"ASCEND_REPLAY": "1", **QUIET}
CHUNK = {**FINAL, "ASCEND_REPLAY_POLICY": "chunk"}
EXACT = {**FINAL, "ASCEND_REPLAY_KEEP": "exact"}


def keep(rows: int) -> dict[str, str]:
    """Settings that keep ``rows`` rows of a prompt."""
    return {**FINAL, "ASCEND_REPLAY_KEEP": str(rows)}


def assert_close(got: torch.Tensor | np.ndarray, want: torch.Tensor | np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=TOLERANCE)


def largest(got: torch.Tensor | np.ndarray, want: torch.Tensor | np.ndarray) -> float:
    """Largest |difference|; infinite where a value is not finite."""
    difference = np.abs(np.asarray(got) - np.asarray(want))
    return float(np.where(np.isfinite(difference), difference, np.inf).max())


def run_prompt(stepper: Stepper, request: StepperRequest, chunks: Sequence[int] = (), **step: Any) -> None:
    """The prompt in ``chunks`` and one chunk with what is left of it, then the decodes one by one."""
    for chunk in chunks:
        stepper.step([(request, chunk)], **step)
    if request.is_prefilling:
        stepper.step([(request, request.prefill_len - request.computed)], **step)
    while request.left:
        stepper.step([(request, 1)], **step)


def late_layers(stepper: Stepper) -> range:
    return range(stepper.model.cut + 1, stepper.model.num_layers)


def chunk_floor(stepper: Stepper, chunks: Sequence[int], length: int) -> dict[int, np.ndarray]:
    """The oracle's floors under ``chunk`` for a prompt of ``sum(chunks)`` tokens."""
    window, floor, begin = stepper.config.sliding_window, np.zeros(length, dtype=int), 0
    for count in chunks:
        if count > window:
            floor[begin : begin + count] = begin + count - window
        begin += count
    return dict.fromkeys(late_layers(stepper), np.minimum(floor, np.arange(length)))


def check_replay(request: StepperRequest, want: OracleRun, cut: int) -> None:
    """Kept rows are the oracle's; other rows are the oracle's up to the cut, and exact zeros at the end."""
    ran, kept = np.flatnonzero(request.ran), np.flatnonzero(request.kept)
    trimmed = np.flatnonzero(request.ran & ~request.kept)
    for layer, entering in request.entering.items():
        rows = ran if layer < cut else kept
        assert_close(entering[rows], want.entering[layer][rows - want.start])
    for layer, aux in request.aux.items():
        rows = ran if layer < cut else kept
        assert_close(aux[rows], want.aux(layer)[rows - want.start])
        assert layer < cut or not aux[trimmed].any()
    assert_close(request.hidden[kept], want.hidden[kept - want.start])
    assert_close(request.logits[kept], want.logits[kept - want.start])
    assert not request.hidden[trimmed].any()


def final_oracle(stepper: Stepper, oracle: Oracle, request: StepperRequest, **run: Any) -> OracleRun:
    """The oracle's run of a request that ``final`` bounds, replay start included."""
    begin = request.prefill_len - stepper.state.replay_keep_last
    start = request.replay_start
    if begin - start < 1:
        return oracle.run(request.tokens, start=start, **run)
    floors = oracle.late_floor(max(begin, start), len(request.tokens), start)
    return oracle.run(request.tokens, start=start, floors=floors, **run)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Work:
    """What ran inside `counted`."""

    launches: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Triton kernels and their grids, in order."""
    operators: Counter[str] = field(default_factory=Counter)
    """PyTorch operators."""
    uploads: int = 0
    """Host-to-device copies of the staging buffers."""


@contextmanager
def counted(stepper: Stepper) -> Iterator[Work]:
    """Counts kernel launches, operators and uploads. Collectives are refused: there is one rank."""
    work, run = Work(), InterpretedFunction.run
    pool = type(stepper.state._start_staging) if hasattr(stepper.state, "_start_staging") else None

    def counting_run(self: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        work.launches.append((self.fn.__name__, tuple(grid)))
        return run(self, *args, grid=grid, **kwargs)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective with one rank")

    patches = [mock.patch.object(InterpretedFunction, "run", counting_run)]
    patches += [mock.patch.object(torch.distributed, name, refuse) for name in ("all_reduce", "all_gather")]
    if pool is not None:
        copy = pool.copy_to_gpu

        def counting_copy(self: Any, *args: Any, **kwargs: Any) -> Any:
            work.uploads += 1
            return copy(self, *args, **kwargs)

        patches.append(mock.patch.object(pool, "copy_to_gpu", counting_copy))
    for patch in patches:
        patch.start()
    try:
        with _Operators() as operators:
            yield work
        work.operators = operators.counts
    finally:
        for patch in patches:
            patch.stop()
