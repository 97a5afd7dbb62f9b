"""Kept rows between two or more GPUs over NCCL, against gathering every state in full.

    python -m benchmarks.exchange_gpu [--ranks 2] [--json FILE] [--require-target]

DeepSeek-V4.1's sizes (hidden 5120, 4 streams, BF16) under sequence parallelism: every rank holds ``T / ranks`` rows of
the streams, the mixes and the token ids, and needs its share of the ``K`` kept rows. Both ways end with the same rows,
compared bit for bit. Times are medians over repeated steps, by the device's clock, the largest of the ranks. In a step
the device is busy with the layers before the cut when the exchange is launched, so that the launches cost nothing: here
they queue behind a wait. What an idle device takes, launches included, is told too (``launching``).
``--device cpu`` tries the script over gloo with small sizes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.report import about, write
from vllm_ascend_replay.layouts import GroupRanks, TokenShards, owned_rows, share_of
from vllm_ascend_replay.plan import ReplayPlan

HC = 4
TARGET = 10
"""Times faster than the full gather, at least."""
WAIT_CYCLES = 300_000_000
"""Of the device's clock, at most 2 GHz."""


def make_plan(num_rows: int, kept: int, requests: int) -> tuple[ReplayPlan, np.ndarray, torch.Tensor]:
    """``requests`` prompts of one length that keep their last rows: the plan, the boundaries, the kept rows."""
    boundaries = np.linspace(0, num_rows, requests + 1).astype(np.int64)
    lens = np.diff(np.linspace(0, kept, requests + 1).astype(np.int64)).astype(np.int32)
    dropped = np.concatenate(([0], np.cumsum(np.diff(boundaries) - lens))).astype(np.int32)
    plan = ReplayPlan(lens, np.zeros(requests, dtype=np.int32), dropped, kept, True)
    rows = np.concatenate([np.arange(end - n, end) for end, n in zip(boundaries[1:], lens)])
    return plan, boundaries, torch.from_numpy(rows)


def full_gather(states: list[torch.Tensor], rows: torch.Tensor, size: int, rank: int) -> list[torch.Tensor]:
    """What one does without layouts: every state in full on every rank, then this rank's kept rows of it."""
    share = share_of(len(rows), size)
    kept = []
    for state in states:
        whole = state.new_empty((size * state.shape[0], *state.shape[1:]))
        dist.all_gather_into_tensor(whole, state)
        kept.append(whole.index_select(0, rows[rank * share : (rank + 1) * share]))
    return kept


def milliseconds(step: Callable[[], object], device: torch.device, repeats: int, *, queued: bool) -> float:
    """Median time of ``step`` on this rank; ``queued``: all its launches are made before the device begins."""
    for _ in range(5):
        step()
    dist.barrier()
    if device.type == "cpu":
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    if queued:
        torch.cuda._sleep(WAIT_CYCLES)
    before = time.perf_counter()
    for begin, end in events:
        begin.record()
        step()
        end.record()
    if queued and (time.perf_counter() - before) > 0.8 * WAIT_CYCLES / 2e9:
        raise SystemExit("launching took longer than the wait: fewer --repeats")
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def run(rank: int, size: int, port: int, arguments: argparse.Namespace, run_of: dict[str, Any]) -> None:
    device = torch.device("cpu") if arguments.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        device_id=None if device.type == "cpu" else device,
    )
    ranks = GroupRanks(dist.group.WORLD)
    shards = TokenShards(ranks)
    num_rows, hidden = arguments.tokens, arguments.hidden
    chunk = share_of(num_rows, size)
    g = torch.Generator(device=device).manual_seed(rank)
    states = [
        torch.randn(chunk, HC, hidden, generator=g, device=device, dtype=torch.bfloat16),
        torch.randn(chunk, HC, generator=g, device=device),
        torch.randint(0, 2**31, (chunk,), generator=g, device=device, dtype=torch.int32),
    ]
    results = []
    for kept in arguments.kept:
        for requests in sorted({1, max(kept // 128, 1)}):
            plan, boundaries, rows = make_plan(num_rows, kept, requests)
            rows = rows.to(device)

            def host(plan=plan, boundaries=boundaries, rows=rows):
                # The counts are part of a step's work.
                return shards.gather(states, rows, owned_rows(plan, boundaries, chunk, size))

            ways = {
                "full": lambda rows=rows: full_gather(states, rows, size, rank),
                "host": host,
                "device": lambda rows=rows: shards.gather(states, rows, None),
                "host and back": lambda host=host, kept=kept: shards.collect([host()[0][:, 0]], kept),
            }
            expected = ways["full"]()
            for name in ("host", "device"):
                for got, want in zip(ways[name](), expected):
                    # The last rank's chunk may end with padding.
                    got = got[: want.shape[0]]
                    if not torch.equal(got.flatten().view(torch.uint8), want.flatten().view(torch.uint8)):
                        raise SystemExit(f"{name}: rank {rank} got other rows, K = {kept}")
            queued = {name: milliseconds(step, device, arguments.repeats, queued=True) for name, step in ways.items()}
            launching = {
                f"{name}, launching": milliseconds(ways[name], device, arguments.repeats, queued=False)
                for name in ("full", "host")
            }
            times = torch.tensor([*queued.values(), *launching.values()], device=device)
            dist.all_reduce(times, dist.ReduceOp.MAX)
            result = {"kept": kept, "requests": requests, **dict(zip([*queued, *launching], times.tolist()))}
            result["times faster"] = result["full"] / result["host"]
            results.append(result)
            if rank == 0:
                print({name: round(v, 4) if isinstance(v, float) else v for name, v in result.items()}, flush=True)
    slow = [r for r in results if r["times faster"] < TARGET]
    if rank == 0:
        sizes = {"ranks": size, "tokens": num_rows, "hidden": hidden, "streams": HC, "unit": "ms"}
        write(arguments.json, {**run_of, **sizes, "results": results})
    dist.barrier()
    dist.destroy_process_group()
    if slow and arguments.require_target:
        raise SystemExit(f"less than {TARGET} times faster: {slow}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--kept", type=lambda s: [int(v) for v in s.split(",")], default=[128, 1024])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--require-target", action="store_true", help="fail unless 10 times faster")
    arguments = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    run_of = about("exchange_gpu", parser, arguments, packages=["triton"])
    torch.multiprocessing.spawn(run, args=(arguments.ranks, port, arguments, run_of), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
