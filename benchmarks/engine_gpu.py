"""Time to first token through vLLM's engine on one GPU: this package's replay beside vLLM's own, on one model.

``python -m benchmarks.engine_gpu [--json FILE] [--arms NAMES] [--cases NAMES] [--rounds N] [--seconds S] [--tiny]``
from the repository's root, where vLLM 0.33's Python code is found (``tools/gpu_engine/run.sh``).

The model is the reference model with DeepSeek-V4.1's layer plan and random weights. All arms run in one engine, on
the same weights, caches and prompts (behind a prefix hit, prompts of the same lengths), and take turns: a round runs
every arm once, beginning with another arm each time. Between runs the prefix cache is emptied and, while no request
runs, the arm is changed: which rows are kept, whether the replay graphs are used, or whether `benchmarks.vllm_replay`
hands the steps to vLLM's own replay. The steps are too long for model graphs, so those do not matter. All prompts of
a run arrive together; a time to first token counts from there, and no second token is generated.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import about, say_missed, write
from benchmarks.step_gpu import MODEL
from vllm_ascend_replay.reference.engine import prepare_environment

ARCHITECTURE = "ReplayBenchmarkForCausalLM"


@dataclass(frozen=True)
class Arm:
    """How the steps of a run are trimmed."""

    vllm: bool = False
    """By vLLM's own replay."""
    on: bool = True
    graphs: bool = False
    policy: str = "final"
    keep: str = "window"


ARMS: Mapping[str, Arm] = {
    "off": Arm(on=False),
    "final-eager": Arm(),
    "final": Arm(graphs=True),
    "chunk": Arm(graphs=True, policy="chunk"),
    "exact": Arm(graphs=True, keep="exact"),
    "vllm-eager": Arm(vllm=True),
    "vllm": Arm(vllm=True, graphs=True),
}


@dataclass(frozen=True)
class Case:
    """Prompts that arrive together."""

    prompts: int
    tokens: int
    prefix: int = 0
    """Tokens before those, found in the prefix cache."""


@dataclass(frozen=True)
class Scale:
    """A size of the benchmark."""

    preset: str
    model: Mapping[str, Any]
    engine: Mapping[str, Any]
    cases: Mapping[str, Case]
    graph_sizes: Sequence[int]


FULL = Scale(
    preset="v41-flash-plan",
    model={**MODEL, "max_position_embeddings": 135168},
    engine={
        "dtype": "bfloat16",
        "block_size": 64,
        "max_model_len": 133120,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 16384,
        "kv_cache_memory_bytes": 8 << 30,
        "gpu_memory_utilization": 0.9,
    },
    cases={
        "8K x8": Case(8, 8192),
        "32K x8": Case(8, 32768),
        "128K": Case(1, 131072),
        "64K + 1K": Case(1, 1024, prefix=65536),
    },
    # Kept rows of one and two prompts, at a prompt's end and where replay is exact.
    graph_sizes=(128, 256, 2432, 4864),
)
TINY = Scale(
    preset="tiny",
    model={"max_position_embeddings": 512},
    engine={
        "dtype": "float32",
        "block_size": 8,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 64 << 20,
    },
    cases={"30 x2": Case(2, 30), "150": Case(1, 150), "64 + 20": Case(1, 20, prefix=64)},
    graph_sizes=(8, 16, 32),
)


@dataclass
class Result:
    """One run of one arm."""

    ttft: list[float]
    """Seconds, of each prompt."""
    seconds: float
    """Until the last first token."""
    input_tokens: int
    """Prompt tokens that were not found in the prefix cache."""
    steps: int
    tokens: list[int]
    """The first token of each prompt."""
    peak_bytes: int
    """Device memory beyond what was allocated before."""


class Bench:
    """The engine and its arms."""

    def __init__(self, scale: Scale, *, graphs: bool) -> None:
        import torch
        from vllm import EngineArgs, LLMEngine, ModelRegistry

        from benchmarks.vllm_replay import BenchmarkModel
        from vllm_ascend_replay.reference.config import write_model

        ModelRegistry.register_model(ARCHITECTURE, BenchmarkModel)
        self.torch, self.scale = torch, scale
        self.directory = tempfile.TemporaryDirectory()
        graph_settings = {
            "mode": 0,
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": [8],
            "decoder_replay_cudagraph_capture_sizes": list(scale.graph_sizes),
        }
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(write_model(self.directory.name, scale.preset, **scale.model)),
                hf_overrides={"architectures": [ARCHITECTURE]},
                load_format="dummy",
                skip_tokenizer_init=True,
                disable_log_stats=True,
                enable_prefix_caching=True,
                enforce_eager=not graphs,
                **({"compilation_config": graph_settings} if graphs else {}),
                **scale.engine,
            )
        )
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        self.state = self.runner.model_state
        self.vocabulary = self.engine.model_config.get_vocab_size()
        self._tail, self._graphs = self.state.replay_tail, self.state.replay_graphs
        self._vllm_graphs = self.state.vllm_state.replay_cudagraphs
        self._runs = 0
        if self._tail is None:
            raise RuntimeError("decoder replay is off; the log says why")
        # What lives now lives on, so collections while measuring have little to look at.
        gc.collect()
        gc.freeze()

    @contextmanager
    def running(self, arm: Arm) -> Iterator[None]:
        """Let ``arm`` run the engine's steps."""
        state = self.state
        if arm.vllm:
            state.vllm_state.replay_cudagraphs = self._vllm_graphs if arm.graphs else None
            with state.use_vllm(self.runner):
                yield
            return
        before = state.replay_settings, state.replay_keep_last
        settings = replace(before[0], policy=arm.policy, keep=arm.keep)
        state.replay_settings = settings
        state.replay_keep_last = settings.keep_last(
            window=state.replay_window, num_late_layers=len(self._tail.layers) - 1
        )
        state.replay_tail = self._tail if arm.on else None
        self._tail.batch = None
        state.replay_graphs = self._graphs if arm.graphs else None
        try:
            yield
        finally:
            state.replay_settings, state.replay_keep_last = before
            state.replay_tail, state.replay_graphs = self._tail, self._graphs

    def prompts(self, case: Case, seed: int) -> list[list[int]]:
        """Random token ids; the same for the same seed."""
        draw = np.random.default_rng(seed)
        prefix = np.random.default_rng(case.prefix).integers(0, self.vocabulary, case.prefix)
        return [
            [*prefix.tolist(), *draw.integers(0, self.vocabulary, case.tokens).tolist()] for _ in range(case.prompts)
        ]

    def warm_prefix(self, case: Case) -> None:
        """Leave nothing but the case's prefix in the prefix cache."""
        assert self.engine.reset_prefix_cache()
        if case.prefix:
            self.generate([self.prompts(replace(case, prompts=1), 0)[0][: case.prefix + 1]])

    def generate(self, prompts: Sequence[Sequence[int]]) -> tuple[dict[int, tuple[float, Any]], float, int]:
        """First tokens of prompts that arrive together: seconds and output of each, seconds of all, and steps."""
        from vllm import SamplingParams

        self.torch.accelerator.synchronize()
        first: dict[int, tuple[float, Any]] = {}
        began, steps, base = time.perf_counter(), 0, self._runs
        for prompt in prompts:
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
            self.engine.add_request(str(self._runs), {"prompt_token_ids": list(prompt)}, params)
            self._runs += 1
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now, steps = time.perf_counter() - began, steps + 1
            first.update({int(output.request_id) - base: (now, output) for output in outputs})
        return first, time.perf_counter() - began, steps

    def run(self, case: Case, arm: Arm, seed: int) -> Result:
        """Measure one arm on one case; prompts that share a seed are the same."""
        prompts = self.prompts(case, seed)
        cuda = self.torch.cuda if self.torch.cuda.is_available() else None
        gc.collect()
        with self.running(arm):
            if cuda is not None:
                cuda.synchronize()
                cuda.reset_peak_memory_stats()
            base = 0 if cuda is None else cuda.memory_allocated()
            first, seconds, steps = self.generate(prompts)
            peak = 0 if cuda is None else cuda.max_memory_allocated()
        outputs = [first[i] for i in range(len(prompts))]
        cached = sum(output.num_cached_tokens for _, output in outputs)
        if cached != case.prompts * case.prefix:
            raise RuntimeError(f"{cached} tokens were found in the prefix cache, not {case.prompts * case.prefix}")
        return Result(
            ttft=[moment for moment, _ in outputs],
            seconds=seconds,
            input_tokens=sum(map(len, prompts)) - cached,
            steps=steps,
            tokens=[output.outputs[0].token_ids[0] for _, output in outputs],
            peak_bytes=peak - base,
        )

    def shutdown(self) -> None:
        self.engine.engine_core.shutdown()
        self.directory.cleanup()


def measure(
    bench: Bench, cases: Mapping[str, Case], arms: Mapping[str, Arm], *, rounds: int, seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rounds of every case; a case begins no further round once its share of ``seconds`` is used up.

    Yields:
        Each case's name and, for each arm, what was measured, as soon as it is there.
    """
    names = list(arms)
    began = time.perf_counter()
    for number, (label, case) in enumerate(cases.items()):
        until = began + seconds * (number + 1) / len(cases)
        runs: dict[str, list[Result]] = {name: [] for name in names}
        bench.warm_prefix(case)
        # What follows a hit is over soon, and paced by the host, whose times scatter.
        for turn in range(-1, rounds * 5 if case.prefix else rounds):
            if turn > 0 and time.perf_counter() > until:
                break
            first = max(turn, 0) % len(names)
            turns = names[first:] + names[:first]
            if turn < 0 and not case.prefix and number:
                turns = names[:1]  # this round does not count: what the case is first to need is compiled in it
            for name in turns:
                if not case.prefix:
                    bench.warm_prefix(case)
                # A suffix that an arm has run is in the prefix cache.
                seed = (1 + turn) * len(names) + (names.index(name) if case.prefix else 0)
                result = bench.run(case, arms[name], seed)
                if turn >= 0:
                    runs[name].append(result)
                print(f"{label:>10} round {turn} {name:>12}: {result.seconds * 1e3:8.1f} ms", flush=True)
        # After a hit every arm has prompts of its own: another arm's would be found in the cache.
        off = () if case.prefix else runs.get("off", ())
        rows = {name: _summary(done, off) for name, done in runs.items()}
        for row in rows.values():
            for base in ("off", "vllm"):
                if base in rows:
                    row[f"ttft_speedup_over_{base}"] = rows[base]["ttft_p50_ms"] / row["ttft_p50_ms"]
        yield label, rows


def _summary(runs: Sequence[Result], off: Sequence[Result]) -> dict[str, Any]:
    """Medians over the prompts and rounds of one case and arm."""
    same = [a == b for run, other in zip(runs, off) for a, b in zip(run.tokens, other.tokens)]
    return {
        "rounds": len(runs),
        "ttft_p50_ms": statistics.median(moment for run in runs for moment in run.ttft) * 1e3,
        "input_tokens_per_s": statistics.median(run.input_tokens / run.seconds for run in runs),
        "seconds": [run.seconds for run in runs],
        "ttft_ms": [[moment * 1e3 for moment in run.ttft] for run in runs],
        "steps": runs[0].steps,
        "peak_mib": max(run.peak_bytes for run in runs) / 2**20,
        "tokens": [run.tokens for run in runs],
        "first_tokens_as_off": sum(same) / len(same) if same else None,
    }


def missed_targets(results: Mapping[str, Any]) -> list[str]:
    """``final`` with graphs is at least as fast as vLLM's own replay everywhere, and faster on a chunked prompt."""
    missed = []
    for label, rows in results.items():
        if "final" in rows and "vllm" in rows:
            ours, theirs = rows["final"]["ttft_p50_ms"], rows["vllm"]["ttft_p50_ms"]
            if ours > theirs or (label == "128K" and ours == theirs):
                missed.append(f"{label}: {ours:.1f} ms, vLLM's own replay {theirs:.1f} ms")
    return missed


def print_table(results: Mapping[str, Any]) -> None:
    heads = f"{'TTFT p50 ms':>12} {'input tok/s':>12} {'of off':>8} {'of vLLM':>8} {'peak MiB':>9}"
    print(f"\n{'case':>10} {'arm':>12} {heads}")
    for label, rows in results.items():
        for name, row in rows.items():
            ratios = (row.get(f"ttft_speedup_over_{base}") for base in ("off", "vllm"))
            cells = " ".join(f"{'-' if ratio is None else f'{ratio:.3f}x':>8}" for ratio in ratios)
            print(
                f"{label:>10} {name:>12} {row['ttft_p50_ms']:12.1f} {row['input_tokens_per_s']:12.0f} {cells} "
                f"{row['peak_mib']:9.0f}"
            )


def _chosen(names: str | None, table: Mapping[str, Any], what: str) -> dict[str, Any]:
    wanted = list(table) if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in table]:
        raise SystemExit(f"no such {what}: {', '.join(unknown)}; there are {', '.join(table)}")
    return {name: table[name] for name in wanted}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--arms", metavar="NAMES", help=f"some of {', '.join(ARMS)}; default all")
    parser.add_argument("--cases", metavar="NAMES", help=f"some of {', '.join(FULL.cases)}; default all")
    parser.add_argument("--rounds", type=int, default=3, help="of each case, at most; five times as many of a hit")
    parser.add_argument("--seconds", type=float, default=240, help="to measure for, roughly")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any machine: nothing worth reporting")
    parser.add_argument("--require-targets", action="store_true", help="exit 1 if a target is missed")
    arguments = parser.parse_args(argv)
    os.environ.update(prepare_environment({}))
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu and not arguments.tiny:
        print("bench-gpu: skipped, this machine has no NVIDIA GPU")
        return 0
    scale = TINY if arguments.tiny else FULL
    arms, cases = _chosen(arguments.arms, ARMS, "arm"), _chosen(arguments.cases, scale.cases, "case")
    if not on_gpu:
        arms = {name: replace(arm, graphs=False) for name, arm in arms.items()}
    began = time.perf_counter()
    bench = Bench(scale, graphs=on_gpu)
    ready = time.perf_counter() - began
    print(f"engine ready after {ready:.0f} s", flush=True)
    report: dict[str, Any] = {
        **about("engine_gpu", parser, arguments),
        "model": {"preset": scale.preset, **scale.model},
        "engine": dict(scale.engine),
        "ready_s": ready,
        "results": {},
    }
    for label, rows in measure(bench, cases, arms, rounds=arguments.rounds, seconds=arguments.seconds):
        report["results"][label] = rows
        report["missed"] = missed = missed_targets(report["results"])
        write(arguments.json, report)
    print_table(report["results"])
    say_missed(missed, targets="targets")
    bench.shutdown()
    return 1 if missed and arguments.require_targets else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Threads that vLLM leaves behind must not keep the process.
    os._exit(status)
