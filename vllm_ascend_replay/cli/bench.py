"""`vllm-ascend-replay bench`: time to first token and input throughput of one server, or of two side by side.

Load comes in waves: as many requests as the concurrency, sent at once; the next wave begins when all have ended. Waves
of two servers alternate, so that a machine that warms up or slows down does so for both.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import asdict, dataclass, field
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
    from collections.abc import Coroutine, Sequence

    import httpx
    from rich.console import Console

    from vllm_ascend_replay.cli.client import Timing

MODES = ("cold", "hit")
SHOWN_ERRORS = 5


@dataclass(frozen=True)
class Load:
    """What is sent."""

    mode: str
    """``cold``: every prompt is new. ``hit``: all but its last ``suffix`` tokens were sent before."""
    tokens: tuple[int, ...]
    """Prompt lengths; in ``hit`` the suffix is added to them."""
    concurrency: tuple[int, ...]
    waves: int
    warmup: int
    suffix: int
    output_tokens: int
    vocab_size: int
    seed: int


@dataclass
class Cell:
    """One server at one prompt length and one concurrency."""

    server: str
    tokens: int
    """Of a prompt, the suffix included."""
    concurrency: int
    requests: int = 0
    """Measured ones, failed ones included."""
    errors: int = 0
    cached_tokens: int | None = None
    """Of all prompts, as the server counts; ``None``: it does not."""
    ttft_p50: float | None = None
    """Seconds, over the requests that were answered; ``None``: none was."""
    ttft_p99: float | None = None
    input_tokens_per_second: float | None = None
    """Prompt tokens of answered requests over the seconds of all waves, cached ones included."""


@dataclass
class Ratio:
    """The first server over the second."""

    tokens: int
    concurrency: int
    ttft_p50: float | None
    """Below 1: the first is faster."""
    ttft_p99: float | None
    input_tokens_per_second: float | None
    """Above 1: the first is faster."""


@dataclass
class Result:
    """All that was measured."""

    mode: str
    cells: list[Cell]
    ratios: list[Ratio]
    errors: list[str] = field(default_factory=list)
    """Messages of the failed requests."""


@dataclass
class _Samples:
    """What a cell is made from."""

    timings: list[Timing] = field(default_factory=list)
    wave_seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    def fill(self, cell: Cell) -> Cell:
        import numpy as np

        cell.requests, cell.errors = len(self.timings) + len(self.errors), len(self.errors)
        if self.timings:
            first = [t.first_token for t in self.timings]
            cell.ttft_p50, cell.ttft_p99 = (float(np.percentile(first, p)) for p in (50, 99))
            cell.input_tokens_per_second = sum(t.prompt_tokens for t in self.timings) / self.wave_seconds
            cached = [t.cached_tokens for t in self.timings]
            if None not in cached:
                cell.cached_tokens = sum(c for c in cached if c is not None)
        return cell


class Bench:
    """Sends the load to one or two servers."""

    def __init__(self, servers: Sequence[tuple[str, str]], load: Load, http: httpx.AsyncClient) -> None:
        """
        Args:
            servers: one or two of ``(base URL, model name)``.
            load: what to send.
            http: the client.
        """
        import numpy as np

        self.servers = servers
        self.load = load
        self.http = http
        self._rng = np.random.default_rng(load.seed)
        # A run's prompts are new to a server whatever ran before, and to the second of two names of one server.
        self._salt = secrets.token_hex(8)

    async def run(self, console: Console) -> Result:
        """Measure every length and concurrency.

        Raises:
            ServerFault: a request failed before measuring began.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from vllm_ascend_replay.cli.client import ServerFault

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        load = self.load
        cells: list[Cell] = []
        errors: list[str] = []
        points = [(tokens, concurrency) for tokens in load.tokens for concurrency in load.concurrency]
        rounds = (load.warmup + load.waves) * len(self.servers)
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(points) * rounds)
            for tokens, concurrency in points:
                samples = [_Samples() for _ in self.servers]
                for wave in range(load.warmup + load.waves):
                    prefixes, prompts = self._prompts(tokens, concurrency)
                    for side, sample in enumerate(samples):
                        warming = wave < load.warmup
                        doing = f"{tokens} tokens x {concurrency}{', warm-up' if warming else ''}"
                        progress.update(task, description=doing)
                        try:
                            await self._wave(side, prefixes, prompts, None if warming else sample)
                        except ServerFault as fault:
                            if not cells:
                                raise
                            # What was measured before stays.
                            errors.append(f"stopped at {doing}: {fault}")
                            return Result(load.mode, cells, ratios(cells), errors)
                        progress.advance(task)
                length = tokens + (load.suffix if load.mode == "hit" else 0)
                for (url, _), sample in zip(self.servers, samples):
                    cells.append(sample.fill(Cell(url, length, concurrency)))
                    errors += sample.errors
        return Result(load.mode, cells, ratios(cells), errors)

    def _prompts(self, tokens: int, concurrency: int) -> tuple[list[list[int]], list[list[int]]]:
        """Prefixes to send first (none when cold), and the prompts of a wave."""
        from vllm_ascend_replay.cli.client import random_prompt

        def new(n: int) -> list[int]:
            return random_prompt(self._rng, n, self.load.vocab_size)

        prompts = [new(tokens) for _ in range(concurrency)]
        if self.load.mode == "cold":
            return [], prompts
        return prompts, [[*prefix, *new(self.load.suffix)] for prefix in prompts]

    async def _wave(
        self,
        side: int,
        prefixes: list[list[int]],
        prompts: list[list[int]],
        samples: _Samples | None,
    ) -> None:
        """One wave; without ``samples`` it is a warm-up, where a fault ends the command."""
        await _answered([self._send(side, f"prefix {i + 1}", p) for i, p in enumerate(prefixes)], samples)
        began = time.perf_counter()
        sent = [self._send(side, f"{len(p)} tokens, {i + 1}", p) for i, p in enumerate(prompts)]
        timings = await _answered(sent, samples)
        if samples is not None:
            samples.wave_seconds += time.perf_counter() - began
            samples.timings += timings

    async def _send(self, side: int, name: str, prompt: list[int]) -> Timing:
        from vllm_ascend_replay.cli.client import stream

        url, model = self.servers[side]
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": self.load.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": f"{self._salt} {side}",
        }
        return await stream(self.http, url, name, body, expected_tokens=len(prompt))


async def _answered(requests: Sequence[Coroutine[Any, Any, Timing]], samples: _Samples | None) -> list[Timing]:
    """Send them all; those that were answered. A fault is counted in ``samples``, or ends the command without."""
    from vllm_ascend_replay.cli.client import ServerFault

    timings = []
    for answer in await asyncio.gather(*requests, return_exceptions=True):
        if not isinstance(answer, BaseException):
            timings.append(answer)
        elif samples is None or not isinstance(answer, ServerFault):
            raise answer
        else:
            samples.errors.append(str(answer))
    return timings


def ratios(cells: Sequence[Cell]) -> list[Ratio]:
    """First server over second for every point; empty with one server."""

    def over(a: float | None, b: float | None) -> float | None:
        return a / b if a is not None and b else None

    by_point: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        by_point.setdefault((cell.tokens, cell.concurrency), []).append(cell)
    return [
        Ratio(
            *point,
            over(pair[0].ttft_p50, pair[1].ttft_p50),
            over(pair[0].ttft_p99, pair[1].ttft_p99),
            over(pair[0].input_tokens_per_second, pair[1].input_tokens_per_second),
        )
        for point, pair in by_point.items()
        if len(pair) == 2
    ]


def show(console: Console, result: Result) -> None:
    """Tables; errors last, where they are seen."""
    from rich.table import Table

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    def milliseconds(value: float | None) -> str:
        return number(None if value is None else 1000 * value, 1)

    table = Table(title=f"{result.mode} prompts")
    headings = "server", "tokens", "concurrency", "requests", "errors", "cached", "p50 ms", "p99 ms", "input tok/s"
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for c in result.cells:
        counts = str(c.tokens), str(c.concurrency), str(c.requests), str(c.errors)
        cached = number(c.cached_tokens, 0)
        table.add_row(
            c.server,
            *counts,
            cached,
            *map(milliseconds, (c.ttft_p50, c.ttft_p99)),
            number(c.input_tokens_per_second, 0),
        )
    console.print(table)
    if result.ratios:
        first, second = result.cells[0].server, result.cells[1].server
        table = Table(title=f"{first} over {second}")
        for heading in ("tokens", "concurrency", "TTFT p50", "TTFT p99", "input tok/s"):
            table.add_column(heading, justify="right")
        for r in result.ratios:
            figures = (number(v, 3) for v in (r.ttft_p50, r.ttft_p99, r.input_tokens_per_second))
            table.add_row(str(r.tokens), str(r.concurrency), *figures)
        console.print(table)
    if result.errors:
        requests = sum(cell.requests for cell in result.cells)
        console.print(f"FAILED: {len(result.errors)} of {requests} requests:", highlight=False)
        for message in result.errors[:SHOWN_ERRORS]:
            console.print(f"  {message}", highlight=False, markup=False, soft_wrap=True)
        if len(result.errors) > SHOWN_ERRORS:
            console.print(f"  and {len(result.errors) - SHOWN_ERRORS} more", highlight=False)


def plot(result: Result, path: Path) -> None:
    """TTFT over prompt length, one line for each server and concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for server, concurrency in dict.fromkeys((c.server, c.concurrency) for c in result.cells):
        cells = [c for c in result.cells if (c.server, c.concurrency) == (server, concurrency) and c.ttft_p50]
        milliseconds = [1000 * c.ttft_p50 for c in cells if c.ttft_p50]
        axes.plot([c.tokens for c in cells], milliseconds, marker="o", label=f"{server}, {concurrency} at once")
    axes.set(xlabel="prompt length (tokens)", ylabel="time to first token, median (ms)", title=f"{result.mode} prompts")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def bench(
    url: Annotated[str, typer.Option(help="The server, e.g. http://localhost:8000")],
    mode: Annotated[str, typer.Option(help="cold: new prompts; hit: a prefix was sent before.")] = "cold",
    tokens: Annotated[str, typer.Option(help="Prompt lengths (hit: of the prefix), e.g. 8192,65536.")] = "8192,65536",
    concurrency: Annotated[str, typer.Option(help="Requests sent at once, e.g. 1,8.")] = "1,8",
    compare: Annotated[str | None, typer.Option(help="A second server; waves alternate A B A B.")] = None,
    waves: Annotated[int, typer.Option(help="Measured waves per point.", min=1)] = 5,
    warmup: Annotated[int, typer.Option(help="Waves before them that are not measured.", min=0)] = 1,
    suffix_tokens: Annotated[int, typer.Option(help="New tokens after the prefix (hit).", min=1)] = 1024,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1)] = 1,
    vocab_size: VocabSize = 32000,
    model: ModelName = None,
    seed: Annotated[int, typer.Option(help="Of the random prompts.", min=0)] = 0,
    api_key: ApiKey = None,
    timeout: Timeout = 600,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw TTFT over prompt length into this PNG file.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure time to first token (p50, p99) and input tokens per second with streaming requests in waves.

    Exit status: 0 measured, 1 a request failed, 2 bad arguments.
    """
    from importlib.util import find_spec

    if mode not in MODES:
        raise typer.BadParameter(f"{mode!r}; allowed: {', '.join(MODES)}", param_hint="--mode")
    writable(json_file)
    writable(plot_file, "--plot")
    if plot_file is not None and plot_file.suffix.lower() != ".png":
        raise typer.BadParameter(f"{plot_file.name} is no PNG file: its name must end in .png", param_hint="--plot")
    if plot_file is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "matplotlib is not installed: pip install 'vllm-ascend-replay[plot]'", param_hint="--plot"
        )
    load = Load(
        mode,
        positive_numbers(tokens, "--tokens"),
        positive_numbers(concurrency, "--concurrency"),
        waves,
        warmup,
        suffix_tokens,
        output_tokens,
        vocab_size,
        seed,
    )
    raise typer.Exit(_bench(url, compare, load, model, api_key, timeout, plot_file, json_file))


def _bench(
    url: str,
    compare: str | None,
    load: Load,
    model: str | None,
    api_key: str | None,
    timeout: float,
    plot_file: Path | None,
    json_file: Path | None,
) -> int:
    from vllm_ascend_replay.cli.client import ServerFault

    console = wide_console()
    urls = [url] if compare is None else [url, compare]
    try:
        result = asyncio.run(_measure(urls, load, model, api_key, timeout, console))
    except ServerFault as fault:
        return end_failed(console, fault, json_file)
    show(console, result)
    if plot_file is not None:
        plot(result, plot_file)
    write_json(json_file, {**asdict(result), "passed": not result.errors})
    return 1 if result.errors else 0


async def _measure(
    urls: list[str], load: Load, model: str | None, api_key: str | None, timeout: float, console: Console
) -> Result:
    import httpx

    from vllm_ascend_replay.cli.client import Completions, headers

    servers = []
    for url in urls:
        server = Completions(url, model=model, api_key=api_key, timeout=timeout)
        servers.append((server.url, server.model))
        server.close()
    limits = httpx.Limits(max_connections=max(load.concurrency), max_keepalive_connections=max(load.concurrency))
    async with httpx.AsyncClient(
        headers=headers(api_key), timeout=httpx.Timeout(timeout, connect=10), limits=limits
    ) as http:
        return await Bench(servers, load, http).run(console)
