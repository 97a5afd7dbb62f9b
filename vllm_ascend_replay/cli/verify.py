"""`vllm-ascend-replay verify`: does a running server with replay still answer as a full run does?

A full run is a server with replay off, or the same server when it is asked for the prompt's log-probabilities: such a
request keeps every row.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_ascend_replay.cli.options import (
    ApiKey,
    JsonFile,
    ModelName,
    Timeout,
    VocabSize,
    end_failed,
    positive_numbers,
    wide_console,
    writable,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_ascend_replay.cli.client import Completions

Distribution = Mapping[int, float]
"""``{token id: log-probability}`` of the most likely tokens, or of all."""

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLE = 8
"""Tokens of a needle's key, and of its value."""
SMALLEST_MASS = 1e-6
"""Probability below which what the lists leave out is nothing but rounding."""


@dataclass(frozen=True)
class Prompt:
    """A prompt to compare on."""

    name: str
    prompt: list[int] | str


@dataclass
class Compared:
    """What came of one prompt; divergences in nats, over the generated tokens."""

    name: str
    tokens: int
    trimmed: bool
    """Longer than the window, so that a server with replay may trim it."""
    first_token_agrees: bool
    greedy_agreement: float
    """Share of the generated tokens that a full run would have chosen too, near-ties included."""
    mean_kl: float
    max_kl: float
    last_window_kl: float | None
    """The yardstick: mean divergence of a full run that sees the last window of the prompt only."""


@dataclass
class Needle:
    """A value hidden in a long prompt, asked for at its end."""

    depth: float
    found: int
    """Of `NEEDLE` tokens."""
    found_in_full: int
    """By the full run."""


@dataclass(frozen=True)
class Limits:
    """What a good server may not exceed."""

    mean_kl: float
    max_kl: float
    first_token: float
    greedy: float
    lost_needles: int


@dataclass
class Check:
    """One line of the verdict."""

    name: str
    value: float
    limit: str
    passed: bool


@dataclass
class Report:
    """All that was found."""

    url: str
    baseline: str
    window: int
    prompts: list[Compared]
    needles: list[Needle]
    checks: list[Check]
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


# -- numbers ------------------------------------------------------------------------------------------------------


def divergence(full: Distribution, other: Distribution) -> float:
    """KL(full || other) in nats over the tokens that both name, the rest counted as one token.

    Lumping tokens together never makes a divergence larger: with short lists it is a lower bound, with the whole
    vocabulary it is exact.
    """
    both = full.keys() & other.keys()
    kl = sum(math.exp(full[token]) * (full[token] - other[token]) for token in both)
    rest = 1 - sum(math.exp(full[token]) for token in both)
    other_rest = 1 - sum(math.exp(other[token]) for token in both)
    if rest > SMALLEST_MASS:
        kl += rest * math.log(rest / max(other_rest, SMALLEST_MASS))
    return max(kl, 0.0)


def agrees(full: Distribution, token: int, tie: float) -> bool:
    """Whether a full run would have chosen ``token``, or one as good: within ``tie`` nats of its best."""
    return full.get(token, -math.inf) >= max(full.values()) - tie


def judge(prompts: Sequence[Compared], needles: Sequence[Needle], limits: Limits) -> list[Check]:
    """The verdict, over the prompts that replay may trim."""
    trimmed = [p for p in prompts if p.trimmed]
    if not trimmed:
        return [Check("prompts longer than the window", 0, ">= 1", False)]
    mean = sum(p.mean_kl for p in trimmed) / len(trimmed)
    largest = max(p.max_kl for p in trimmed)
    first = sum(p.first_token_agrees for p in trimmed) / len(trimmed)
    greedy = sum(p.greedy_agreement for p in trimmed) / len(trimmed)
    checks = [
        Check("mean KL", mean, f"<= {limits.mean_kl:g}", mean <= limits.mean_kl),
        Check("max KL", largest, f"<= {limits.max_kl:g}", largest <= limits.max_kl),
        Check("first-token agreement", first, f">= {limits.first_token:g}", first >= limits.first_token),
        Check("greedy agreement", greedy, f">= {limits.greedy:g}", greedy >= limits.greedy),
    ]
    yardstick = [p.last_window_kl for p in trimmed if p.last_window_kl is not None]
    if yardstick:
        # A server that forgot everything before the window would score the yardstick itself.
        last_window = sum(yardstick) / len(yardstick)
        checks.insert(2, Check("mean KL against last window only", mean, f"< {last_window:.3g}", mean < last_window))
    if needles:
        lost = sum(n.found < NEEDLE <= n.found_in_full for n in needles)
        checks.append(Check("needles lost", lost, f"<= {limits.lost_needles}", lost <= limits.lost_needles))
    return checks


# -- a server -----------------------------------------------------------------------------------------------------


class Side:
    """One server, asked for tokens and log-probabilities."""

    def __init__(self, server: Completions, logprobs: int) -> None:
        """
        Args:
            server: the server.
            logprobs: log-probabilities to ask for at each position; -1: all.
        """
        self.server = server
        self.logprobs = logprobs
        # Every prompt is cold, whatever earlier requests and runs left in the prefix cache.
        self._salt = secrets.token_hex(8)

    def generate(
        self, name: str, prompt: Sequence[int] | str, tokens: int, *, keep_rows: bool = False
    ) -> tuple[list[int], list[int], list[dict[int, float]]]:
        """Continue ``prompt`` greedily.

        Args:
            name: of the request.
            prompt: token ids or a text.
            tokens: how many to generate.
            keep_rows: ask for prompt log-probabilities, which makes it a full run.

        Returns:
            The prompt's token ids, the generated ones, and the distribution of each.
        """
        fields = self._fields(name, max_tokens=tokens, logprobs=self.logprobs)
        if keep_rows:
            fields["prompt_logprobs"] = 0
        choice = self.server.complete(name, prompt, **fields)
        lists = (choice.get("logprobs") or {}).get("top_logprobs")
        if not lists:
            raise self.server.fault(name, prompt, "the answer has no log-probabilities", **fields)
        generated = choice.get("token_ids")
        ids = prompt if isinstance(prompt, list) else choice.get("prompt_token_ids")
        if not generated or ids is None:
            raise self.server.fault(name, prompt, "the answer has no token ids (return_token_ids)", **fields)
        try:
            found = [{int(key.removeprefix("token_id:")): float(p) for key, p in row.items()} for row in lists]
        except (ValueError, AttributeError, TypeError) as error:
            what = "the log-probabilities do not name token ids (return_tokens_as_token_ids)"
            raise self.server.fault(name, prompt, what, **fields) from error
        if not len(found) == len(generated) == tokens:
            what = f"{len(generated)} tokens with {len(found)} log-probabilities came back"
            raise self.server.fault(name, prompt, what, **fields)
        return list(ids), list(generated), found

    def score(self, name: str, prompt: Sequence[int], generated: Sequence[int]) -> list[dict[int, float]]:
        """The distributions before each token of ``generated``, given the prompt and the tokens before it.

        One full run: every row is kept since every prompt log-probability is read.
        """
        whole = [*prompt, *generated]
        fields = self._fields(name, max_tokens=1, prompt_logprobs=self.logprobs)
        choice = self.server.complete(name, whole, **fields)
        rows = choice.get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(whole) or None in rows[len(prompt) :]:
            raise self.server.fault(name, whole, "the answer has no log-probabilities of the prompt", **fields)
        try:
            return [{int(k): float(entry["logprob"]) for k, entry in row.items()} for row in rows[len(prompt) :]]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            what = "the prompt's log-probabilities cannot be read"
            raise self.server.fault(name, whole, what, **fields) from error

    def _fields(self, name: str, **fields: Any) -> dict[str, Any]:
        return {
            **fields,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": f"{self._salt} {name}",
        }


def compare(replay: Side, full: Side, prompt: Prompt, tokens: int, window: int, tie: float) -> Compared:
    """Continue a prompt with replay and score the very tokens in a full run."""
    ids, generated, with_replay = replay.generate(prompt.name, prompt.prompt, tokens)
    in_full = full.score(f"{prompt.name}, full", ids, generated)
    kls = [divergence(p, q) for p, q in zip(in_full, with_replay)]
    last_window = None
    trimmed = len(ids) > window
    if trimmed:
        seen = full.score(f"{prompt.name}, last window only", ids[-window:], generated)
        last_window = sum(divergence(p, q) for p, q in zip(in_full, seen)) / tokens
    agreeing = [agrees(p, token, tie) for p, token in zip(in_full, generated)]
    return Compared(
        name=prompt.name,
        tokens=len(ids),
        trimmed=trimmed,
        first_token_agrees=agreeing[0],
        greedy_agreement=sum(agreeing) / tokens,
        mean_kl=sum(kls) / tokens,
        max_kl=max(kls),
        last_window_kl=last_window,
    )


def needle_prompt(rng: Any, length: int, depth: float, vocab_size: int) -> tuple[list[int], list[int]]:
    """``length`` random tokens that hold ``key value`` at ``depth`` and end with ``key``; and the value."""
    from vllm_ascend_replay.cli.client import random_prompt

    key, value = (random_prompt(rng, NEEDLE, vocab_size) for _ in range(2))
    filler = random_prompt(rng, length - 3 * NEEDLE, vocab_size)
    at = round(depth * len(filler))
    return [*filler[:at], *key, *value, *filler[at:], *key], value


def find_needle(replay: Side, full: Side, rng: Any, length: int, depth: float, vocab_size: int) -> Needle:
    """Ask both for the value of one needle."""
    prompt, value = needle_prompt(rng, length, depth, vocab_size)
    name = f"needle at {depth:.0%}"
    _, found, _ = replay.generate(name, prompt, NEEDLE)
    _, in_full, _ = full.generate(f"{name}, full", prompt, NEEDLE, keep_rows=True)
    return Needle(depth, _matching(found, value), _matching(in_full, value))


def _matching(tokens: Sequence[int], value: Sequence[int]) -> int:
    return sum(a == b for a, b in zip(tokens, value))


def read_prompts(path: Path) -> list[Prompt]:
    """A user's prompts: JSON lines, each a text, a list of token ids, or ``{"name", "prompt"}`` of either.

    Raises:
        ValueError: a line that is none of these; the message names it.
    """
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error})") from error
        name = f"line {number}"
        if isinstance(value, dict):
            name, value = str(value.get("name", name)), value.get("prompt")
        ids = isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value)
        if not ids and not (isinstance(value, str) and value):
            raise ValueError(f"{path}, line {number}: neither a text nor a list of token ids")
        prompts.append(Prompt(name, value))
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


# -- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is compared."""

    lengths: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    tokens: int
    window: int
    tie: float
    needle_tokens: int
    vocab_size: int
    seed: int
    limits: Limits


def run(replay: Side, full: Side, plan: Plan, console: Console) -> Report:
    """Compare all prompts and needles."""
    import numpy as np
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from vllm_ascend_replay.cli.client import random_prompt

    rng = np.random.default_rng(plan.seed)
    prompts = [Prompt(f"random {n}", random_prompt(rng, n, plan.vocab_size)) for n in plan.lengths]
    prompts += plan.prompts
    depths = DEPTHS if plan.needle_tokens else ()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    compared, needles = [], []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("comparing", total=len(prompts) + len(depths))
        for prompt in prompts:
            progress.update(task, description=prompt.name)
            compared.append(compare(replay, full, prompt, plan.tokens, plan.window, plan.tie))
            progress.advance(task)
        for depth in depths:
            progress.update(task, description=f"needle at {depth:.0%}")
            needles.append(find_needle(replay, full, rng, plan.needle_tokens, depth, plan.vocab_size))
            progress.advance(task)
    report = Report(
        url=replay.server.url,
        baseline="itself, with prompt log-probabilities" if full is replay else full.server.url,
        window=plan.window,
        prompts=compared,
        needles=needles,
        checks=judge(compared, needles, plan.limits),
    )
    report.notes = list(_notes(replay.server.metrics(), compared))
    return report


def _notes(metrics: str, prompts: Sequence[Compared]) -> Iterator[str]:
    """What the figures alone do not say: whether replay was seen at work."""
    names = ("replay_steps", "skipped_steps")
    lines = [line for line in metrics.splitlines() if line.startswith("vllm_ascend_replay_")]
    steps = sum(float(line.rsplit(" ", 1)[1]) for line in lines if any(f"replay_{n}_total" in line for n in names))
    if steps:
        yield f"replay is at work: the server's metrics count {steps:.0f} trimmed or skipped steps"
    elif lines:
        yield "the server's metrics count no trimmed step: replay is on and bounded no prompt"
    trimmed = [p.mean_kl for p in prompts if p.trimmed]
    if not steps and trimmed and max(trimmed) < SMALLEST_MASS:
        yield "no difference at all to a full run: replay is off or lossless (ASCEND_REPLAY_KEEP=exact) on this server"


def show(console: Console, report: Report) -> None:
    """Tables and the verdict."""
    from rich.table import Table

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2e}"

    table = Table(title=f"{report.url} against {report.baseline}")
    for heading in ("prompt", "tokens", "first token", "greedy", "mean KL", "max KL", "mean KL, last window only"):
        table.add_column(heading, justify="left" if heading == "prompt" else "right")
    for p in report.prompts:
        first = "equal" if p.first_token_agrees else "differs"
        kls = number(p.mean_kl), number(p.max_kl), number(p.last_window_kl)
        table.add_row(p.name, str(p.tokens), first, f"{p.greedy_agreement:.0%}", *kls)
    console.print(table)
    if report.needles:
        table = Table("depth", "found", "full run", title=f"needles (of {NEEDLE} tokens)")
        for n in report.needles:
            table.add_row(f"{n.depth:.0%}", str(n.found), str(n.found_in_full))
        console.print(table)
    table = Table("check", "found", "limit", "", title=f"verdict over prompts longer than the window ({report.window})")
    for check in report.checks:
        table.add_row(check.name, f"{check.value:.4g}", check.limit, "ok" if check.passed else "FAILED")
    console.print(table)
    for note in report.notes:
        console.print(f"Note: {note}.", highlight=False, markup=False)
    if report.passed:
        console.print("PASSED: the server answers as a full run does, within the limits.", highlight=False)
    else:
        failed = ", ".join(check.name for check in report.checks if not check.passed)
        console.print(f"FAILED: {failed}.", highlight=False, markup=False)


@contextmanager
def demo_server() -> Iterator[str]:
    """The reference model with replay on, on this machine."""
    import tempfile

    from vllm_ascend_replay.reference.config import write_model
    from vllm_ascend_replay.reference.engine import prepare_environment
    from vllm_ascend_replay.reference.server import serve

    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model", "tiny")
        environ = {**prepare_environment({}), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with serve(model, Path(scratch) / "server.log", environ=environ) as url:
            yield url


def verify(
    url: Annotated[str | None, typer.Option(help="The server with replay, e.g. http://localhost:8000")] = None,
    baseline_url: Annotated[
        str | None, typer.Option(help="A server with replay off. Left out: the server itself with prompt logprobs.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Start the small reference model here and verify it.")] = False,
    model: ModelName = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Your prompts: JSON lines of texts or token-id lists.", exists=True, dir_okay=False),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Lengths of the built-in random prompts, in tokens.")] = (
        "65,129,130,255,257,450,706,1930,4099"
    ),
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.", min=1)] = 16,
    window: Annotated[int, typer.Option(help="The model's sliding window.", min=1)] = 128,
    needle_tokens: Annotated[int, typer.Option(help="Length of the needle prompts; 0: none.", min=0)] = 1930,
    vocab_size: VocabSize = 32000,
    logprobs: Annotated[
        int, typer.Option(help="Log-probabilities per position; -1: all (server: --max-logprobs -1).", min=-1)
    ] = 20,
    max_mean_kl: Annotated[float, typer.Option(help="Limit of the mean KL, in nats.", min=0)] = 0.02,
    max_kl: Annotated[float, typer.Option(help="Limit of the largest KL, in nats.", min=0)] = 0.2,
    min_first_token: Annotated[float, typer.Option(help="Least share of equal first tokens.", min=0, max=1)] = 0.9,
    min_greedy: Annotated[float, typer.Option(help="Least share of equal greedy tokens.", min=0, max=1)] = 0.9,
    max_lost_needles: Annotated[int, typer.Option(help="Needles only the full run may find.", min=0)] = 0,
    tie: Annotated[
        float, typer.Option(help="Nats below the full run's best token that still count as agreement.", min=0)
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Of the random prompts.", min=0)] = 0,
    api_key: ApiKey = None,
    timeout: Timeout = 600,
    json_file: JsonFile = None,
) -> None:
    """Compare a server that has replay on with a full run: log-probabilities, greedy tokens, needles.

    Exit status: 0 within the limits, 1 not, or a server that does not answer, 2 bad arguments.
    """
    if (url is None) != demo:
        raise typer.BadParameter("give either --url or --demo", param_hint="--url")
    if demo and baseline_url is not None:
        raise typer.BadParameter("--demo compares the server with itself", param_hint="--baseline-url")
    if 0 < needle_tokens < 4 * NEEDLE:
        raise typer.BadParameter(f"a needle prompt has at least {4 * NEEDLE} tokens", param_hint="--needle-tokens")
    if logprobs == 0:
        raise typer.BadParameter("at least one log-probability is needed", param_hint="--logprobs")
    try:
        own = tuple(read_prompts(prompts)) if prompts is not None else ()
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="--prompts") from error
    writable(json_file)
    limits = Limits(max_mean_kl, max_kl, min_first_token, min_greedy, max_lost_needles)
    plan = Plan(
        positive_numbers(lengths, "--lengths"), own, tokens, window, tie, needle_tokens, vocab_size, seed, limits
    )
    raise typer.Exit(_verify(url, baseline_url, plan, logprobs, model, api_key, timeout, json_file))


DEMO_PLAN: dict[str, Any] = {
    "lengths": (5, 9, 10, 15, 17, 65, 129, 257, 706),
    "window": 8,
    "needle_tokens": 257,
    "vocab_size": 97,
}
"""Fits the reference model's preset ``tiny``."""


def _verify(
    url: str | None,
    baseline_url: str | None,
    plan: Plan,
    logprobs: int,
    model: str | None,
    api_key: str | None,
    timeout: float,
    json_file: Path | None,
) -> int:
    from contextlib import ExitStack

    from vllm_ascend_replay.cli.client import Completions, ServerFault
    from vllm_ascend_replay.reference.server import ServerFailed

    console = wide_console()
    with ExitStack() as stack:
        try:
            if url is None:
                missing = _missing_for_demo()
                if missing:
                    raise ServerFailed(missing)
                with console.status("starting a server with the reference model"):
                    url = stack.enter_context(demo_server())
                plan, logprobs = replace(plan, **DEMO_PLAN), -1
            server = Completions(url, model=model, api_key=api_key, timeout=timeout)
            stack.callback(server.close)
            replay = full = Side(server, logprobs)
            if baseline_url is not None:
                baseline = Completions(baseline_url, model=model, api_key=api_key, timeout=timeout)
                stack.callback(baseline.close)
                full = Side(baseline, logprobs)
            report = run(replay, full, plan, console)
        except (ServerFault, ServerFailed) as fault:
            return end_failed(console, fault, json_file)
    show(console, report)
    write_json(json_file, {**asdict(report), "passed": report.passed})
    return 0 if report.passed else 1


def _missing_for_demo() -> str | None:
    from vllm_ascend_replay.cli.demo import missing_part

    return missing_part()
