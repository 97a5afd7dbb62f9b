"""Check every kernel for every target, then the controls; print a table and one closing line."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.check_kernels import controls, registry
from tools.check_kernels.lowering import TARGETS, Rejected, Target, check_declaration
from tools.check_kernels.simulation import simulated
from vllm_ascend_replay import kernels

_IN_PARALLEL = os.cpu_count() or 1


@dataclass
class Outcome:
    """What became of one job, which ran in a process of its own."""

    result: Any = None
    rejected: str | None = None
    """Why, if it was."""
    notes: list[str] = field(default_factory=list)
    """What the job said last, newest last."""


def run_jobs(jobs: list[Callable[[Callable[[str], None]], Any]]) -> list[Outcome]:
    """Run each job in a fork, a few at a time: an access outside a buffer ends the process.

    A job gets a function to note what it is about to do.
    """
    outcomes: list[Outcome | None] = [None] * len(jobs)
    running: dict[int, tuple[int, Any]] = {}
    todo = list(enumerate(jobs))
    while todo or running:
        while todo and len(running) < _IN_PARALLEL:
            index, job = todo.pop(0)
            pid, reader = _start(job)
            running[pid] = (index, reader)
        pid, status = os.wait()
        index, reader = running.pop(pid)
        outcomes[index] = _collect(reader, status)
    return outcomes  # type: ignore[return-value]


def _start(job: Callable[[Callable[[str], None]], Any]) -> tuple[int, Any]:
    # A file, not a pipe: nobody reads while the job runs.
    file = os.fdopen(os.memfd_create("job"), "r+b")
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid, file

    def say(kind: str, what: Any) -> None:
        pickle.dump((kind, what), file)
        file.flush()

    code = 0
    try:
        say("result", job(lambda note: say("note", note)))
    except Rejected as error:
        say("rejected", str(error))
    except BaseException as error:
        say("rejected", f"{type(error).__name__}: {error}")
        code = 1
    finally:
        os._exit(code)


def _collect(file: Any, status: int) -> Outcome:
    outcome = Outcome()
    file.seek(0)
    while True:
        try:
            kind, what = pickle.load(file)
        except EOFError:
            break
        if kind == "note":
            outcome.notes.append(what)
        else:
            setattr(outcome, kind, what)
    file.close()
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        outcome.rejected = f"access outside a buffer ({name})" if name == "SIGSEGV" else f"ended by {name}"
    if outcome.rejected and outcome.notes:
        outcome.rejected += f" in: {outcome.notes[-1]}"
    return outcome


@dataclass
class Report:
    """What was seen of one kernel on one target."""

    variants: int
    ub_bytes: int
    ub_limit: int
    routines: int
    launches: dict[str, int]


def check_kernel(name: str, target: Target, note: Callable[[str], None]) -> Report:
    """Every case of a kernel: compiled, checked, run, compared."""
    entry = registry.KERNELS[name]
    check_declaration(getattr(kernels, name))
    with simulated(kernels, name, target, entry.outputs) as stand_in:
        for what, case in entry.cases():
            note(what)
            case()
    lowered = list(stand_in.compiled.values())
    return Report(
        variants=len(lowered),
        ub_bytes=max(one.ub_bytes for one in lowered),
        ub_limit=lowered[0].ub_limit,
        routines=len({routine for one in lowered for routine in one.routines}),
        launches=stand_in.launches,
    )


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def main() -> int:
    """Exit status 0 if everything that must pass passed and everything that must not did not."""
    start = time.monotonic()
    # A fork of a process with OpenMP threads can hang.
    torch.set_num_threads(1)
    registry.use_ascend_tuning()
    pairs = [(name, target) for name in registry.KERNELS for target in TARGETS]
    jobs: list[Callable[[Callable[[str], None]], Any]] = [
        lambda _: registry.check_complete(),
        lambda _: registry.check_warm_up(),
    ]
    jobs += [lambda note, name=name, target=target: check_kernel(name, target, note) for name, target in pairs]
    jobs += [lambda _: controls.ACCEPTED(), *(lambda _, run=run: run() for run, _ in controls.CONTROLS.values())]
    complete, warm_up, *outcomes = run_jobs(jobs)

    failures = [whole.rejected for whole in (complete, warm_up) if whole.rejected is not None]
    rows: list[tuple[str, ...]] = [("kernel", "target", "variants", "UB bytes", "of", "stages", "simulated")]
    for (name, target), outcome in zip(pairs, outcomes):
        report = outcome.result
        if outcome.rejected is not None:
            failures.append(f"{name} for {target.arch}: {outcome.rejected}")
            rows.append((name, target.arch, "-", "-", "-", "REJECTED", "-"))
            continue
        launches = ", ".join(f"{level} {count}" for level, count in report.launches.items())
        rows.append(
            (
                name,
                target.arch,
                str(report.variants),
                str(report.ub_bytes),
                str(report.ub_limit),
                f"ttir ttadapter hivm -{target.assembler}",
                launches,
            )
        )
    print(*_table(rows), sep="\n")

    print("\nnegative controls, all to be rejected:")
    accepted, *bad = outcomes[len(pairs) :]
    if accepted.rejected is not None:
        failures.append(f"the good control was rejected: {accepted.rejected}")
    rows = []
    for (name, (_, reason)), outcome in zip(controls.CONTROLS.items(), bad):
        why = outcome.rejected or "ACCEPTED"
        rows.append((name, why))
        if not re.search(reason, why):
            failures.append(f"control '{name}' should be rejected for /{reason}/: {why}")
    print(*_table(rows), sep="\n")

    print(f"\n{time.monotonic() - start:.0f} s")
    for failure in failures:
        print(f"FAILED: {failure}")
    if failures:
        return 1
    print(f"{len(registry.KERNELS)} kernels x {len(TARGETS)} targets: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
