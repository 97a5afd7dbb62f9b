"""`vllm-ascend-replay demo`: the engine with replay off and on, compared with each other and with the oracle."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_ascend_replay.cli import cases as demo_cases
from vllm_ascend_replay.cli.cases import TOLERANCE, Case, all_cases, kept_rows, oracle_logprobs
from vllm_ascend_replay.cli.options import write_json
from vllm_ascend_replay.plan import exact_rows
from vllm_ascend_replay.reference.engine import RequestRun, Run, prepare_environment

if TYPE_CHECKING:
    from vllm_ascend_replay.reference.oracle import Oracle

INTRODUCTION = """\
A small DeepSeek-V4.1-shaped model (9 layers, 4 of them replay layers, window 8,
random weights) runs through vLLM's engine three times: replay off, replay on,
and replay on in its lossless setting. This takes about a minute."""
LEGEND = """\
rows: what the replay layers ran without and with replay, decodes included.
skipped: steps in which no row was left for the replay layers; they did not run.
same tokens: as without replay. Only "exact" must; with random weights others
may differ, because all but the last window of a prompt is left out.
max diff: largest difference of any log-probability (every token, the whole
vocabulary) to an independent dense float64 computation that sees the same
window; for "exact" also to the run without replay."""
LOG_LINES = 30
"""Of a failed engine's log, shown to the user."""


Advance = Callable[..., None]
"""``advance(doing, steps=1)``: something ended, and what comes next; ``steps=0``: something begins."""


class EngineFailed(RuntimeError):
    """An engine's process ended without all answers."""


@dataclass(frozen=True)
class Arm:
    """One engine: a setting and the cases that run under it."""

    title: str
    settings: dict[str, str]
    cases: list[Case]


@dataclass(frozen=True)
class Outcome:
    """What all engines did."""

    ready: dict[str, Any]
    """What the first engine said of itself: ``vllm``, ``runner``, ``seconds`` to start."""
    off: dict[str, Run]
    """Each case's run without replay."""
    on: dict[str, Run]
    oracle: Oracle


@dataclass
class Result:
    """One line of the table."""

    name: str
    prompt_tokens: int
    chunks: int
    rows_off: int
    rows_on: int
    skipped_steps: int
    tokens_equal_off: bool
    max_abs_logprob_diff: float
    seconds: float
    faults: list[str] = field(default_factory=list)
    """Why the case failed."""

    def as_json(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name != "faults"}
        if not np.isfinite(self.max_abs_logprob_diff):
            values["max_abs_logprob_diff"] = None  # JSON has no NaN
        return values


def run_demo(json_file: Path | None = None, console: Console | None = None) -> int:
    """Run the demo, show its table, write ``json_file``.

    Returns:
        The exit status: 0 if every case passed, else 1.
    """
    console = console or Console()
    missing = missing_part()
    if missing:
        console.print(f"The demo cannot run here: {missing}", highlight=False)
        write_json(json_file, {"passed": False, "error": f"the demo cannot run here: {missing}"})
        return 1
    try:
        console.print(INTRODUCTION, highlight=False)
        ready, results = _compare(console)
    except EngineFailed as failure:
        console.print(str(failure), highlight=False, markup=False)
        write_json(json_file, {"passed": False, "error": str(failure)})
        return 1
    passed = not any(result.faults for result in results)
    show(console, results, ready)
    report = {
        "vllm": ready["vllm"],
        "runner": ready["runner"],
        "cases": [result.as_json() for result in results],
        "passed": passed,
    }
    write_json(json_file, report)
    return 0 if passed else 1


def missing_part() -> str | None:
    """What this environment lacks for the demo, or ``None``."""
    own_environment = "run `make demo` in a checkout, which makes an environment of its own"
    if find_spec("vllm") is None:
        return f"vLLM is not installed; {own_environment}."
    if find_spec("vllm_ascend") is not None:
        return f"vllm-ascend is installed, and the demo's model runs on vLLM's CPU build; {own_environment}."
    import torch

    if not torch.cuda.is_available() and not entry_points(group="triton.backends", name="cpu"):
        return f"Triton has no backend for CPUs (tools/triton-interpreter is one); {own_environment}."
    return None


def _compare(console: Console) -> tuple[dict[str, Any], list[Result]]:
    """Run every engine and judge every case, under a progress bar."""
    cases = all_cases()
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with tempfile.TemporaryDirectory() as scratch, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("preparing", total=None)

        def advance(doing: str, steps: int = 1) -> None:
            progress.update(task, advance=steps, description=doing)
            if not console.is_terminal and not steps:
                console.print(doing, highlight=False)  # there is no bar

        arms = arms_of(cases)
        progress.update(task, total=sum(1 + len(arm.cases) for arm in arms) + len(cases))
        outcome = run_engines(arms, Path(scratch), advance)
        results = []
        for case in cases:
            advance(f"oracle: {case.name}", steps=0)
            results.append(judge(case, outcome.off[case.compared_with], outcome.on[case.name], outcome.oracle))
            advance(f"oracle: {case.name}")
    return outcome.ready, results


def arms_of(cases: Sequence[Case]) -> list[Arm]:
    """Replay off, on, and on in its lossless setting."""
    windowed, exact = ([case for case in cases if case.keep == keep] for keep in ("window", "exact"))
    return [
        Arm("replay off", {"ASCEND_REPLAY": "0"}, windowed),
        Arm("replay on", {}, windowed),
        Arm("replay on, exact", {"ASCEND_REPLAY_KEEP": "exact"}, exact),
    ]


def run_engines(arms: Sequence[Arm], scratch: Path, advance: Advance) -> Outcome:
    """Run the arms one after the other; the first is the one without replay.

    Raises:
        EngineFailed: a process ended early.
    """
    import torch

    from vllm_ascend_replay.reference.config import ReferenceConfig, write_model
    from vllm_ascend_replay.reference.oracle import Oracle

    config = ReferenceConfig.from_pretrained(write_model(scratch / "model", demo_cases.MODEL))
    (ready, off), *others = [run_arm(arm, scratch, advance) for arm in arms]
    on = {name: run for _, runs in others for name, run in runs.items()}
    return Outcome(ready, off, on, Oracle(config, torch.load(scratch / "weights.pt")))


def run_arm(arm: Arm, scratch: Path, advance: Advance) -> tuple[dict[str, Any], dict[str, Run]]:
    """Run one engine in a process of its own.

    Args:
        arm: what to run.
        scratch: directory that holds ``model``; takes the log and the weights.
        advance: is told what happens.

    Returns:
        What the engine said of itself, and each case's run.

    Raises:
        EngineFailed: the process ended early.
    """
    job = {
        "model": str(scratch / "model"),
        "engine": demo_cases.ENGINE,
        "cases": [
            {"name": c.name, "before": [asdict(r) for r in c.before], "requests": [asdict(r) for r in c.requests]}
            for c in arm.cases
        ],
        "weights": str(scratch / "weights.pt"),
    }
    ready: dict[str, Any] = {}
    runs: dict[str, Run] = {}
    doing = "starting vLLM"
    advance(f"{arm.title}: {doing}", steps=0)
    with _worker(job, prepare_environment(arm.settings), scratch / "log") as answers:
        for line in answers:
            answer = json.loads(line)
            if "ready" in answer:
                ready = answer["ready"]
            else:
                runs[answer["case"]] = Run.from_dict(answer["run"])
            doing = next((case.name for case in arm.cases if case.name not in runs), "done")
            advance(f"{arm.title}: {doing}")
    if len(runs) < len(arm.cases):
        log = (scratch / "log").read_text(errors="replace").splitlines()
        raise EngineFailed("\n".join([*log[-LOG_LINES:], f"FAILED: {doing} ({arm.title}): the engine's process ended"]))
    return ready, runs


@contextmanager
def _worker(job: dict[str, Any], environment: dict[str, str], log: Path) -> Iterator[Iterator[str]]:
    """A `cli.worker` process's answers, line by line; whatever happens, the process is gone afterwards."""
    command = [sys.executable, "-m", "vllm_ascend_replay.cli.worker"]
    with log.open("w") as log_file:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file, text=True, env=environment
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(BrokenPipeError):  # it ended at once; its answers are missing, which the caller reports
            process.stdin.write(json.dumps(job))
            process.stdin.close()
        yield iter(process.stdout)
        process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def judge(case: Case, off: Run, on: Run, oracle: Oracle) -> Result:
    """Compare a case's two runs with each other and each with the oracle."""
    config, faults = oracle.config, []
    window = config.sliding_window
    keep = window if case.keep == "window" else exact_rows(config.num_hidden_layers - config.cut - 1, window)
    expected = sum(kept_rows(r, p, keep) for r in case.requests for p in on.requests[r.name].prefills)
    equal = all(off.requests[r.name].tokens == on.requests[r.name].tokens for r in case.requests)
    on_diff = oracle_difference(case, on, oracle, keep)
    off_diff = oracle_difference(case, off, oracle, None)
    if case.off:
        on_diff = max(on_diff, *(difference(off.requests[r.name], on.requests[r.name]) for r in case.requests))
        if not equal:
            faults.append("its tokens differ from those without replay")
    # `not <=` rather than `>`: NaN is a difference.
    if not on_diff <= TOLERANCE:
        faults.append(f"log-probabilities differ by {on_diff:.1e}, allowed are {TOLERANCE:.0e}")
    if not off_diff <= TOLERANCE:
        faults.append(f"without replay log-probabilities differ from the oracle by {off_diff:.1e}")
    rows_on = on.stats["rows_kept"]
    if rows_on != on.layer_rows:
        faults.append(f"the counters say {rows_on} rows, the last layer ran {on.layer_rows}")
    if rows_on != expected:
        faults.append(f"the replay layers ran {rows_on} rows where the prompts' last {keep} make {expected}")
    if case.saves and rows_on >= off.layer_rows:
        faults.append(f"no row was saved: {rows_on} with replay, {off.layer_rows} without")
    faults.extend(filter(None, {case.happened(on), case.happened(off)}))
    return Result(
        name=case.name,
        prompt_tokens=sum(len(request.prompt) for request in case.requests),
        chunks=sum(prefill.chunks for run in on.requests.values() for prefill in run.prefills),
        rows_off=off.layer_rows,
        rows_on=rows_on,
        skipped_steps=on.stats["skipped_steps"],
        tokens_equal_off=equal,
        max_abs_logprob_diff=on_diff,
        seconds=round(on.seconds, 3),
        faults=faults,
    )


def oracle_difference(case: Case, run: Run, oracle: Oracle, keep: int | None) -> float:
    """Largest difference between a case's log-probabilities and the oracle's; ``keep`` None: replay off."""
    worst = 0.0
    for request in case.requests:
        got = run.requests[request.name]
        tokens, prompt = oracle_logprobs(oracle, request, got, keep)
        worst = _worse(worst, got.logprobs, tokens)
        if request.prompt_logprobs:
            worst = _worse(worst, got.prompt_logprobs or [], prompt)
    return worst


def difference(a: RequestRun, b: RequestRun) -> float:
    """Largest difference of two runs' log-probabilities; infinite where their tokens differ."""
    return _worse(0.0, a.logprobs, np.array(b.logprobs)) if a.tokens == b.tokens else float("inf")


def _worse(worst: float, got: Sequence[Sequence[float]], expected: np.ndarray) -> float:
    values = np.array(got)
    if values.shape != expected.shape:
        return float("inf")
    # Unlike `max`, NumPy's maximum keeps a NaN.
    return float(np.maximum(worst, abs(values - expected).max()))


def show(console: Console, results: Sequence[Result], ready: dict[str, Any]) -> None:
    """The table and the verdict."""
    title = f"vLLM {ready['vllm']}, Model Runner {ready['runner'].upper()}"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0)
    table.add_column("\ncase", no_wrap=True)
    for header in ("prompt\ntokens", "\nchunks", "rows\noff", "rows\non", "\nskipped"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("same\ntokens", justify="center", no_wrap=True)
    table.add_column("max\ndiff", justify="right", no_wrap=True)
    table.add_column("\nsec.", justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            str(result.prompt_tokens),
            str(result.chunks),
            str(result.rows_off),
            str(result.rows_on),
            str(result.skipped_steps),
            "yes" if result.tokens_equal_off else "no",
            f"{result.max_abs_logprob_diff:.1e}",
            f"{result.seconds:.1f}",
            style="red" if result.faults else "",
        )
    console.print(table)
    console.print(LEGEND + "\n", highlight=False)
    failed = [result for result in results if result.faults]
    for result in failed:
        for fault in result.faults:
            console.print(f"FAILED: {result.name}: {fault}", style="red", highlight=False, markup=False)
    if not failed:
        rows_off, rows_on = sum(r.rows_off for r in results), sum(r.rows_on for r in results)
        console.print(
            f"Passed: the replay layers ran {rows_on} of {rows_off} rows, and every log-probability is within "
            f"{TOLERANCE:.0e} of the oracle's.",
            highlight=False,
        )
