"""The kernels on an NVIDIA GPU: right first, then how fast, beside plain PyTorch and the floor of the bytes.

``python -m benchmarks.kernels_gpu [--json FILE] [--skip-tests] [--require-targets]`` from the repository's root; needs
PyTorch, Triton and pytest, no vLLM. Every time is the median of 50 launches between CUDA events, on inputs that
rotate through more memory than the L2 cache holds. The floor counts each byte that must be read or written once, at
the bandwidth of a large copy on the same device.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import about, say_missed, write
from vllm_ascend_replay import kernels

TOKENS = 16384
HIDDEN = 5120
STREAMS = 4
GROUPS = 5
KEPT = (128, 1024, 8192)
REQUESTS = (1, 8, 64)
REPEATS = 50
WARM_UPS = 6

# What must hold on an H200.
MIN_COPY_SHARE = 0.70
"""Of the copy bandwidth, gather and scatter together, from 1024 kept rows on."""
MAX_SMALL_GATHER_US = 12.0
"""Gather of 128 rows."""
MAX_LAUNCHES = 3


def median_us(calls: Sequence[Callable[[], Any]]) -> tuple[float, float]:
    """Device time and host time of one call in microseconds; the calls take turns."""
    rotation = itertools.cycle(calls)
    for _ in range(WARM_UPS):
        next(rotation)()
    torch.cuda.synchronize()
    device, host = [], []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The device is kept busy until all is queued, so that the events do not see the host.
        torch.cuda._sleep(400_000)
        call = next(rotation)
        start.record()
        begin = time.perf_counter()
        call()
        host.append(time.perf_counter() - begin)
        end.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end) * 1e3)
    return statistics.median(device), statistics.median(host) * 1e6


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device-to-device copy of 1 GiB."""
    count = 1 << 30
    pairs = [
        (
            torch.randint(0, 127, (count,), dtype=torch.int8, device="cuda"),
            torch.empty(count, dtype=torch.int8, device="cuda"),
        )
        for _ in range(2)
    ]
    us, _ = median_us([lambda a=a, b=b: b.copy_(a) for a, b in pairs])
    return 2 * count / us * 1e6


def count_launches(call: Callable[[], Any]) -> int:
    """Kernels that a call starts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


class Step:
    """One step's tensors: ``requests`` equal prompts that keep their last rows."""

    def __init__(self, kept: int, requests: int, seed: int) -> None:
        g = torch.Generator(device="cuda").manual_seed(seed)

        def bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            high = torch.iinfo(torch.int64).max if dtype == torch.int64 else 2**15 - 1
            kind = {torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(dtype, dtype)
            return torch.randint(0, high, shape, dtype=kind, generator=g, device="cuda").view(dtype)

        length, keeps = TOKENS // requests, kept // requests
        ends = range(length, TOKENS + 1, length)
        as_int32 = {"dtype": torch.int32, "device": "cuda"}
        self.query_start_loc = torch.tensor([0, *ends], **as_int32)
        self.dropped_before = torch.arange(requests + 1, **as_int32) * (length - keeps)
        self.requests = torch.arange(requests, **as_int32)
        self.rows = torch.tensor([t for end in ends for t in range(end - keeps, end)], device="cuda")
        self.states = [
            bits(TOKENS, STREAMS, HIDDEN, dtype=torch.bfloat16),
            bits(TOKENS, STREAMS, dtype=torch.float32),
            torch.arange(TOKENS, device="cuda") % length,  # positions
            bits(TOKENS, dtype=torch.int32),
        ]
        self.gathered = [torch.full_like(state[:kept], 7) for state in self.states]
        self.values = bits(kept, HIDDEN, dtype=torch.bfloat16)
        self.out = torch.full((TOKENS, HIDDEN), 7, dtype=torch.bfloat16, device="cuda")
        self.slots = bits(GROUPS, TOKENS, dtype=torch.int64)
        self.batch = {
            "rows": torch.empty_like(self.rows),
            "boundaries": torch.empty(requests + 1, **as_int32),
            "kept_positions": torch.empty_like(self.rows),
            "kept_slot_mappings": torch.empty((GROUPS, kept), dtype=torch.int64, device="cuda"),
            "kv_start": torch.zeros(requests, **as_int32),
            "kept_kv_start": torch.empty(requests, **as_int32),
        }
        self.replay_start = torch.full((requests,), 5, **as_int32)
        self.cacheable = torch.tensor([0, 2], **as_int32)
        row = sum(state[0].numel() * state.element_size() for state in self.states)
        self.gather_bytes = kept * (2 * row + 8)
        self.scatter_bytes = (kept + TOKENS) * HIDDEN * 2

    def gather(self) -> None:
        kernels.gather_states(self.rows, self.states, self.gathered)

    def scatter(self) -> None:
        kernels.scatter_rows(
            [self.values], [self.out], query_start_loc=self.query_start_loc, dropped_before=self.dropped_before
        )

    def both(self) -> None:
        self.gather()
        self.scatter()

    def gather_batch(self) -> None:
        kernels.gather_batch(
            query_start_loc=self.query_start_loc,
            dropped_before=self.dropped_before,
            requests=self.requests,
            positions=self.states[2],
            slot_mappings=self.slots,
            num_padded=len(self.rows),
            **self.batch,
        )

    def pad(self) -> None:
        kernels.pad_replayed_slots(
            self.slots,
            groups=self.cacheable,
            query_start_loc=self.query_start_loc,
            positions=self.states[2],
            replay_start=self.replay_start,
            window=128,
        )

    def torch_gather(self) -> list[torch.Tensor]:
        return [state.index_select(0, self.rows) for state in self.states]

    def torch_scatter(self) -> torch.Tensor:
        return self.values.new_zeros((TOKENS, HIDDEN)).index_copy_(0, self.rows, self.values)

    def check(self) -> None:
        """The timed tensors are right, bit for bit."""
        self.both()
        for got, want in zip([*self.gathered, self.out], [*self.torch_gather(), self.torch_scatter()]):
            kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
            assert torch.equal(got.view(kind), want.view(kind)), "wrong result"


def measure(kept: int, requests: int, bandwidth: float, cache_bytes: int) -> dict[str, Any]:
    """One row of the table."""
    first = Step(kept, requests, 0)
    sets = max(2, -(-3 * cache_bytes // first.gather_bytes))
    steps = [first, *(Step(kept, requests, seed) for seed in range(1, sets))]
    first.check()
    row: dict[str, Any] = {"requests": requests, "kept": kept, "input_sets": sets}
    for name in ("gather", "scatter", "both", "torch_gather", "torch_scatter", "gather_batch", "pad"):
        row[f"{name}_us"], row[f"{name}_host_us"] = median_us([getattr(step, name) for step in steps])
    row["gather_floor_us"] = first.gather_bytes / bandwidth * 1e6
    row["scatter_floor_us"] = first.scatter_bytes / bandwidth * 1e6
    row["copy_share"] = (row["gather_floor_us"] + row["scatter_floor_us"]) / row["both_us"]
    row["launches"] = count_launches(first.both)
    return row


def missed_targets(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What must hold on an H200 and does not."""
    missed = []
    for row in rows:
        where = f"R={row['requests']} K={row['kept']}"
        if row["kept"] >= 1024 and row["copy_share"] < MIN_COPY_SHARE:
            missed.append(f"{where}: {row['copy_share']:.0%} of the copy bandwidth, {MIN_COPY_SHARE:.0%} wanted")
        if row["kept"] == 128 and row["gather_us"] > MAX_SMALL_GATHER_US:
            missed.append(f"{where}: gather in {row['gather_us']:.1f} us, {MAX_SMALL_GATHER_US} wanted")
        if row["launches"] > MAX_LAUNCHES:
            missed.append(f"{where}: {row['launches']} launches, {MAX_LAUNCHES} wanted")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    parser.add_argument("--require-targets", action="store_true", help="exit 1 if a target of an H200 is missed")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench-gpu: skipped, this machine has no NVIDIA GPU")
        return 0
    if not arguments.skip_tests:
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels"]
        if find_spec("xdist"):
            tests += ["-n", "8"]  # most of the time goes into compiling
        if subprocess.run(tests).returncode:
            return 1
    properties = torch.cuda.get_device_properties(0)
    bandwidth = copy_bandwidth()
    cache = properties.L2_cache_size
    print(
        f"{properties.name}, PyTorch {torch.__version__}, Triton {kernels.triton.__version__}; "
        f"copy {bandwidth / 1e12:.2f} TB/s, L2 {cache >> 20} MiB\n"
        f"T={TOKENS} H={HIDDEN} hc={STREAMS}; device microseconds, (host microseconds per call)"
    )
    empty, _ = median_us([lambda: None])
    print(f"events around nothing: {empty:.1f} us, in every figure")
    header = ("R", "K", "gather", "floor", "torch", "scatter", "floor", "torch", "both", "of copy", "batch", "pad")
    print("".join(name.rjust(14) for name in header))
    rows = []
    for kept, requests in itertools.product(KEPT, REQUESTS):
        row = measure(kept, requests, bandwidth, cache)
        rows.append(row)
        cells = [
            str(requests),
            str(kept),
            *(
                f"{row[name + '_us']:.1f}" + (f" ({row[name + '_host_us']:.0f})" if name + "_host_us" in row else "")
                for name in (
                    "gather",
                    "gather_floor",
                    "torch_gather",
                    "scatter",
                    "scatter_floor",
                    "torch_scatter",
                    "both",
                )
            ),
            f"{row['copy_share']:.0%}",
            *(f"{row[name + '_us']:.1f} ({row[name + '_host_us']:.0f})" for name in ("gather_batch", "pad")),
        ]
        print("".join(cell.rjust(14) for cell in cells), flush=True)
        torch.cuda.empty_cache()
    missed = missed_targets(rows)
    say_missed(missed)
    measured = {"copy_bytes_per_second": bandwidth, "events_around_nothing_us": empty, "rows": rows, "missed": missed}
    write(arguments.json, {**about("kernels_gpu", parser, arguments, packages=["triton"]), **measured})
    return 1 if missed and arguments.require_targets else 0


if __name__ == "__main__":
    sys.exit(main())
