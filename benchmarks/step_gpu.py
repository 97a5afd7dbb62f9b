"""Whole prefills and decode steps of the reference model on one NVIDIA GPU, with and without decoder replay.

``python -m benchmarks.step_gpu [--json FILE] [--quick] [--isl 4096,16384] [--requests 1] [--arms off,graphs]`` from the
repository's root, with vLLM importable (``tools/gpu_engine/run.sh`` where it is not installed).

The model has DeepSeek-V4.1-Flash's layer plan at half its widths. Its steps go through the reference host's own
metadata, plan, replay batch, tail and graphs (`benchmarks.steps`). Arms take turns in one process; a time is the
median of the repetitions, a ratio the median of the ratios within a repetition.

Arms: *off*, no replay; *eager*, replay without graphs; *graphs*; *exact*, 2414 rows kept, with graphs; *floor*, the
layers before the cut and the cut layer's KV write only. The *ideal* of an arm is the floor and, for each step in
which a prompt ends, the replay layers on exactly the kept rows, timed alone in one graph.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import about, say_missed, write

LENGTHS = (1024, 4096, 8192, 16384, 32768, 131072)
REQUESTS = (1, 8)
DECODES = (1, 32, 256)
DECODE_CONTEXT = 1024
MAX_NUM_TOKENS = 16384
MAX_PREFILL = 8 * 32768
"""Tokens of the largest prefill: eight prompts of 128K would take a minute for each arm, and tell nothing new."""

MAX_EAGER = 16384
"""Tokens of the largest prefill for which replay without graphs is measured beside replay with them."""

MODEL = dict(
    hidden_size=2560,
    num_attention_heads=32,
    head_dim=256,
    qk_rope_head_dim=32,
    q_lora_rank=640,
    o_groups=8,
    o_lora_rank=512,
    index_n_heads=16,
    index_head_dim=64,
    index_topk=256,
    candidate_topk_blocks=1024,
    candidate_block_size=8,
    num_experts=64,
    num_experts_per_tok=6,
    moe_intermediate_size=1152,
    vocab_size=4096,
    dtype="bfloat16",
)
"""The widths, with V4.1-Flash's layer plan, window 128 and four streams: half the model's, fewer experts."""

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "off": {"ASCEND_REPLAY": "0"},
    "eager": {"ASCEND_REPLAY_GRAPHS": "0"},
    # Of the default ladder those sizes that these batches are padded to: capturing all takes longer than most prefills.
    "graphs": {"ASCEND_REPLAY_GRAPH_SIZES": "128,256,512,1024,2048"},
    "exact": {"ASCEND_REPLAY_KEEP": "exact", "ASCEND_REPLAY_GRAPH_SIZES": "2414,2560"},
    "exact rows": {"ASCEND_REPLAY_KEEP": "exact", "ASCEND_REPLAY_GRAPHS": "0"},
}
ARMS = ("off", "eager", "graphs", "exact", "floor")
IDEALS = {"graphs": "eager", "eager": "eager", "exact": "exact rows"}
"""For each arm the state that plans its rows without padding."""


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def paired(values: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios within a repetition."""
    return median([a / b for a, b in zip(values, others)])


def repetitions(tokens: int, quick: bool) -> tuple[int, int]:
    """Repetitions that count and those before them that do not."""
    if quick:
        return 3, 1
    # What does not count compiles the kernels for this number of rows.
    return (9, 2) if tokens <= 1024 else (5, 1) if tokens <= 4096 else (3, 1) if tokens <= 32768 else (2, 1)


@dataclass
class Profile:
    """What one step ran."""

    kernels: int
    """On the device."""
    launches: int
    """By the host; a graph is one."""
    device_ms: float
    top: list[tuple[str, int, float]]
    """The kernels with the most device time: name, how often, milliseconds in all."""


def profile(call: Callable[[], Any]) -> Profile:
    """Run ``call`` under the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as result:
        call()
        torch.cuda.synchronize()
    by_name: dict[str, list[float]] = {}
    launches = 0
    # The raw events: making a tree of thousands takes seconds.
    for event in result.profiler.kineto_results.events():
        name = event.name()
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            launches += name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch"))
        elif not name.startswith(("Memcpy", "Memset")):
            by_name.setdefault(name, []).append(event.duration_ns() / 1e6)
    top = sorted(((name[:80], len(ms), sum(ms)) for name, ms in by_name.items()), key=lambda entry: -entry[2])
    times = [ms for values in by_name.values() for ms in values]
    return Profile(len(times), launches, sum(times), top[:12])


def peak_bytes(call: Callable[[], Any], synchronize: Callable[[], None]) -> int:
    """Device memory that a call takes at most beyond what was allocated before it."""
    if not torch.cuda.is_available():
        call()
        return 0
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


class Bench:
    """The host, a state for each setting, and the arms."""

    def __init__(self, host: Any, arms: Sequence[str], num_pages: int) -> None:
        from benchmarks.steps import Arm

        self.host = host
        host.allocate(num_pages)
        wanted = {"off", *arms} - {"floor"}
        wanted |= {IDEALS[arm] for arm in arms if arm in IDEALS}
        self.states = {name: host.make_state(SETTINGS[name]) for name in SETTINGS if name in wanted}
        self.arms = {name: Arm(self.states[name]) for name in self.states}
        self.arms["floor"] = Arm(self.states["off"], front_only=True)

    def prefill(self, num_reqs: int, length: int, names: Sequence[str], quick: bool = False) -> dict[str, Any]:
        """Prefills of ``num_reqs`` prompts of ``length`` tokens in every arm; floor and off are always among them."""
        from benchmarks.steps import synchronize

        host, requests = self.host, self.host.requests(num_reqs, length)
        names = [name for name in ARMS if name in {*names, "off", "floor"}]
        if requests.tokens > MAX_EAGER and "graphs" in names:
            names = [name for name in names if name != "eager"]
        counted, dropped = repetitions(requests.tokens, quick)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        busy: dict[str, list[float]] = {name: [] for name in names}
        results: dict[str, torch.Tensor] = {}
        for repetition in range(counted + dropped):
            for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                synchronize()
                began = time.perf_counter()
                last, host_seconds = host.prefill(requests, self.arms[name])
                synchronize()
                if repetition >= dropped:
                    seconds[name].append(time.perf_counter() - began)
                    busy[name].append(host_seconds)
                results[name] = torch.cat(last).float()
        ends = sum(bool(step.ends) for step in requests.steps)
        row: dict[str, Any] = {
            "requests": num_reqs,
            "isl": length,
            "steps": len(requests.steps),
            "steps_with_ends": ends,
            "repetitions": counted,
            "arms": {},
        }
        alone: dict[str, tuple[int, float] | None] = {}
        for name in names:
            if name in IDEALS and IDEALS[name] not in alone:
                alone[IDEALS[name]] = host.replay_layers_alone(requests, self.states[IDEALS[name]])
        last_step = requests.steps[-1]
        for name in names:
            arm = self.arms[name]
            figures: dict[str, Any] = {
                "ms": median(seconds[name]) * 1e3,
                "all_ms": [value * 1e3 for value in seconds[name]],
                "tokens_per_s": requests.tokens / median(seconds[name]),
                "host_ms": median(busy[name]) * 1e3,
                "of_off": paired(seconds[name], seconds["off"]),
                "peak_bytes": peak_bytes(lambda arm=arm: host.run(last_step, arm), synchronize),
            }
            if torch.cuda.is_available() and num_reqs == 1:
                figures["last_step"] = asdict(profile(lambda arm=arm: host.run(last_step, arm)))
                if len(requests.steps) > ends:
                    figures["first_step"] = asdict(profile(lambda arm=arm: host.run(requests.steps[0], arm)))
            found = alone.get(IDEALS.get(name, ""))
            if found is not None:
                rows, tail = found
                ideal = [value + ends * tail for value in seconds["floor"]]
                figures |= {
                    "kept_rows": rows,
                    "replay_layers_ms": tail * 1e3,
                    "ideal_ms": median(ideal) * 1e3,
                    "of_ideal": paired(ideal, seconds[name]),
                }
            if name not in ("off", "floor"):
                difference = (results[name] - results["off"]).norm() / results["off"].norm()
                figures["difference_to_off"] = float(difference)
            row["arms"][name] = figures
        assert all(value.isfinite().all() for value in results.values()), "a hidden state is not finite"
        return row

    def decode(self, num_reqs: int, context: int, repeats: int) -> dict[str, Any]:
        """Decode steps of ``num_reqs`` requests, off and with replay by turns, eager and in a FULL graph."""
        from benchmarks.steps import CUDAGraphMode, synchronize

        host = self.host
        requests = host.requests(num_reqs, context, room=1)
        # A decode reads the window KV of a prompt's end only.
        host.prefill(requests, self.arms["graphs" if "graphs" in self.arms else "off"])
        step = host.decode_step(requests, context)
        graph = host.full_graph(step, self.arms["off"])

        def replay(arm: Any) -> None:
            host.prepare(step, arm, mode=CUDAGraphMode.FULL)
            graph.replay()

        row: dict[str, Any] = {"requests": num_reqs, "context": context, "repetitions": repeats}
        for mode, run in (("eager", lambda arm: host.run(step, arm)), ("full_graph", replay)):
            seconds: dict[str, list[float]] = {"off": [], "graphs": []}
            for repetition in range(repeats // (2 if mode == "eager" else 1) + 3):
                for name in ("off", "graphs") if repetition % 2 else ("graphs", "off"):
                    synchronize()
                    began = time.perf_counter()
                    run(self.arms[name])
                    synchronize()
                    if repetition >= 3:
                        seconds[name].append(time.perf_counter() - began)
            row[mode] = {
                "off_ms": median(seconds["off"]) * 1e3,
                "on_ms": median(seconds["graphs"]) * 1e3,
                "of_off": paired(seconds["graphs"], seconds["off"]),
                "medians": median(seconds["graphs"]) / median(seconds["off"]),
            }
        return row


def missed_targets(prefills: Sequence[dict[str, Any]], decodes: Sequence[dict[str, Any]]) -> list[str]:
    """What must hold on an H200 and does not."""
    missed = []

    def need(condition: bool, where: str, what: str) -> None:
        if not condition:
            missed.append(f"{where}: {what}")

    for row in prefills:
        arms, length = row["arms"], row["isl"]
        where = f"{row['requests']} x {length}"
        for name in ("graphs", "exact"):
            if name not in arms:
                continue
            figures = arms[name]
            need(figures["of_off"] <= 1.01, where, f"{name} takes {figures['of_off']:.3f} of off, at most 1.01 wanted")
            if "of_ideal" not in figures:
                continue
            least = 0.97 if length >= 16384 else 0.90 if length >= 4096 and name == "graphs" else 0.0
            if length == 131072 and name == "graphs":
                least = 1 / 1.02
            need(
                figures["of_ideal"] >= least,
                where,
                f"{name} at {figures['of_ideal']:.3f} of its ideal, {least:.2f} wanted",
            )
        if "graphs" in arms and "first_step" in arms["graphs"]:
            got, floor = arms["graphs"]["first_step"]["kernels"], arms["floor"]["first_step"]["kernels"]
            need(got == floor, where, f"an intermediate chunk runs {got} kernels, the floor {floor}")
        if length == 131072 and {"graphs", "exact"} <= set(arms):
            speed = paired(arms["graphs"]["all_ms"], arms["exact"]["all_ms"])
            need(speed >= 0.95, where, f"exact at {speed:.3f} of the bounded speed, 0.95 wanted")
    for row in decodes:
        for mode in ("eager", "full_graph"):
            ratio = row[mode]["of_off"]
            need(abs(ratio - 1) <= 0.01, f"decode of {row['requests']}", f"{mode} {ratio:.3f} of off, 1 % wanted")
    return missed


def table(row: Mapping[str, Any]) -> str:
    """A prefill's arms as lines."""
    lines = []
    for name, figures in row["arms"].items():
        kept = f"{figures['kept_rows']} rows {figures['replay_layers_ms']:.1f} ms" if "kept_rows" in figures else ""
        lines.append(
            f"{row['requests']:>2} x {row['isl']:<7}{name:<7}{figures['ms']:>9.1f} ms"
            f"{figures['tokens_per_s']:>9.0f} tok/s"
            f"  of off {figures['of_off']:.3f}  of ideal {figures.get('of_ideal', float('nan')):.3f}"
            f"  host {figures['host_ms']:.1f} ms  peak {figures['peak_bytes'] / 2**20:.0f} MiB"
            + "".join(
                f"  {step}: {figures[step]['kernels']} kernels, {figures[step]['launches']} launches, "
                f"{figures[step]['device_ms']:.1f} ms"
                for step in ("first_step", "last_step")
                if step in figures
            )
            + f"  {kept}"
            f"  diff {figures.get('difference_to_off', 0):.1e}"
        )
    return "\n".join(lines)


def run(
    bench: Bench,
    shapes: Sequence[tuple[int, int]],
    arms: Sequence[str],
    decodes: Sequence[int],
    *,
    context: int = DECODE_CONTEXT,
    quick: bool = False,
    repeats: int = 40,
    deadline: float = math.inf,
    report: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """All measurements; ``report`` is given what there is after each.

    Args:
        shapes: prefills, ``(prompts, tokens of each)``.
        deadline: of `time.perf_counter`; what has not begun by then is left out, and named.
    """
    result: dict[str, Any] = {"prefills": [], "decodes": [], "missed": [], "left_out": []}
    work = [("prefill", shape) for shape in shapes if shape[0] == 1]
    work += [("decode", (count, context)) for count in decodes]
    work += [("prefill", shape) for shape in shapes if shape[0] != 1]
    for kind, (num_reqs, length) in work:
        if time.perf_counter() > deadline:
            result["left_out"].append(f"{kind} of {num_reqs} x {length}")
            continue
        if kind == "prefill":
            row = bench.prefill(num_reqs, length, arms, quick)
            result["prefills"].append(row)
            print(table(row), flush=True)
            report(result)
            continue
        row = bench.decode(num_reqs, length, repeats)
        result["decodes"].append(row)
        print(
            f"decode of {num_reqs}: "
            + "; ".join(
                f"{mode} off {row[mode]['off_ms']:.3f} on {row[mode]['on_ms']:.3f} ms, {row[mode]['of_off']:.4f}"
                for mode in ("eager", "full_graph")
            ),
            flush=True,
        )
        report(result)
    result["missed"] = missed_targets(result["prefills"], result["decodes"])
    report(result)
    return result


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def shapes_of(text: str) -> list[tuple[int, int]]:
    """``1x32768,8x4096``: prompts and the tokens of each."""
    return [(int(count), int(length)) for count, _, length in (part.partition("x") for part in text.split(","))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there, after each measurement")
    parser.add_argument("--quick", action="store_true", help="one prompt of 4K and 16K, three repetitions")
    parser.add_argument("--isl", type=numbers, default=None, help="prompt lengths in tokens")
    parser.add_argument("--requests", type=numbers, default=None, help="prompts of a prefill")
    parser.add_argument("--shapes", type=shapes_of, default=None, metavar="1x32768,8x4096", help="instead of both")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}; off and floor always run")
    parser.add_argument("--decodes", type=numbers, default=None, help="requests of a decode step")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no measurement after so many")
    parser.add_argument("--require-targets", action="store_true", help="exit 1 if a target of an H200 is missed")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench-gpu: skipped, this machine has no NVIDIA GPU")
        return 0
    from benchmarks.steps import StepHost, join_no_one, set_current_vllm_config

    began = time.perf_counter()
    arms = arguments.arms.split(",")
    lengths = arguments.isl or ([4096, 16384] if arguments.quick else list(LENGTHS))
    counts = arguments.requests or ([1] if arguments.quick else list(REQUESTS))
    decodes = ([32] if arguments.quick else list(DECODES)) if arguments.decodes is None else arguments.decodes
    shapes = arguments.shapes or [(count, length) for count in counts for length in lengths]
    shapes = [(count, length) for count, length in shapes if count * length <= MAX_PREFILL]
    host = StepHost(
        overrides=MODEL,
        max_num_tokens=MAX_NUM_TOKENS,
        max_model_len=max([*(length for _, length in shapes), DECODE_CONTEXT + 64]),
        max_num_reqs=max([*(count for count, _ in shapes), *decodes, 8]),
    )
    with set_current_vllm_config(host.vllm_config):
        join_no_one()
    pages = max([host.pages_for(*shape) for shape in shapes] + [host.pages_for(n, DECODE_CONTEXT + 1) for n in decodes])
    bench = Bench(host, arms, pages)
    torch.cuda.synchronize()
    # As vLLM's engine does after start-up: a collection would look at every object of PyTorch and vLLM.
    gc.collect()
    gc.freeze()
    run_of = {
        **about("step_gpu", parser, arguments),
        "model": MODEL,
        "max_num_batched_tokens": MAX_NUM_TOKENS,
        "page_bytes": host.page_bytes,
        "pages": host.num_pages,
        "weights_bytes": sum(weight.nbytes for weight in host.model.weights().values()),
    }
    print(json.dumps(run_of))
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)

    def report(result: dict[str, Any]) -> None:
        write(arguments.json, {**run_of, **result})

    result = run(bench, shapes, arms, decodes, quick=arguments.quick, report=report, deadline=began + arguments.seconds)
    missed = result["missed"]
    print("left out: " + (", ".join(result["left_out"]) or "nothing"))
    say_missed(missed)
    print(f"done after {time.perf_counter() - began:.1f} s")
    return 1 if missed and arguments.require_targets else 0


if __name__ == "__main__":
    sys.exit(main())
