"""An engine in this process on a GPU, and what its replay layers returned in each step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ascend_replay.reference.config import write_model
from vllm_ascend_replay.reference.engine import Engine, Request, Run

WINDOW = 32
SIZES = [32, 64, 96, 160, 256]
MODEL = {"sliding_window": WINDOW, "swa_block_size": 16, "dtype": "bfloat16", "aux_hidden_state_layers": (37, 38, 39)}
ENGINE = {
    "enforce_eager": False,
    "dtype": "bfloat16",
    "block_size": 32,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 512 << 20,
    "gpu_memory_utilization": 0.2,
}


@dataclass
class Step:
    """One step whose replay layers ran on a replay batch."""

    rows: int
    """Kept rows, padding excluded."""
    padded: int
    """Rows that the layers ran."""
    in_graph: bool
    values: list[torch.Tensor]
    """Streams, pre mix and aux states of the kept rows."""


class Probe:
    """Runs requests and remembers what the tail's layers returned."""

    def __init__(self, directory: Path, mode: str, model: dict[str, Any] | None = None, **engine: Any) -> None:
        path = write_model(directory, "v41-flash-plan", **{**MODEL, **(model or {})})
        compilation = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64, 128, 256]}
        began = time.perf_counter()
        self.engine = Engine(str(path), **{**ENGINE, "compilation_config": compilation, **engine})
        self.seconds = time.perf_counter() - began
        worker = self.engine.engine.model_executor.driver_worker.worker
        self.runner = worker.model_runner
        self.state, self.model = self.runner.model_state, self.runner.model
        self.model = getattr(self.model, "unwrap", lambda: self.model)()
        self.tail = self.model.tail
        self.graphs = self.state.replay_graphs
        self.steps: list[Step] = []
        run_batch = self.tail._run_batch

        def recorded(batch: Any, *states: Any) -> Any:
            streams, pre_mix, aux = run_batch(batch, *states)
            if batch is not None and batch.kept is not None:
                count = batch.kept.plan.num_rows
                values = [value[:count].clone() for value in (streams, pre_mix, *aux)]
                self.steps.append(Step(count, batch.kept.num_padded, batch.graph is not None, values))
            return streams, pre_mix, aux

        self.tail._run_batch = recorded

    def run(self, requests: Sequence[Request]) -> tuple[Run, list[Step]]:
        """Run the requests on pages that hold NaN."""
        assert self.engine.engine.reset_prefix_cache()
        self.poison()
        self.steps.clear()
        run = self.engine.run(requests)
        torch.cuda.synchronize()
        return run, list(self.steps)

    def poison(self) -> None:
        """NaN in every page but the null block of each cache."""
        with torch.inference_mode():
            for layer in self.runner.vllm_config.compilation_config.static_forward_context.values():
                layer.kv_cache[1:].fill_(torch.nan)

    @contextmanager
    def eager_but_padded(self) -> Iterator[None]:
        """The same padding, without graphs."""
        for bucket in self.graphs.buckets.values():
            bucket.failed = True
        try:
            yield
        finally:
            for bucket in self.graphs.buckets.values():
                bucket.failed = False

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        self.state.replay_graphs = None
        try:
            yield
        finally:
            self.state.replay_graphs = self.graphs


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1024, length).tolist()


def request(name: str, length: int, at_step: int, max_tokens: int = 1) -> Request:
    return Request(name, prompt(length, sum(map(ord, name)) + length), max_tokens, at_step=at_step)


def schedule() -> list[Request]:
    """Replay batches of many sizes, growing and shrinking: `WINDOW` rows for each long prompt, all of a short one."""
    requests, step = [], 0
    # (long prompts, short prompt's length): one step each.
    for long, short in [(1, 0), (2, 0), (3, 0), (5, 0), (8, 0), (1, 5), (7, 31), (2, 1), (1, 1), (4, 17), (3, 30)]:
        requests += [request(f"l{step}.{i}", 100 + 3 * i, step) for i in range(long)]
        if short:
            requests.append(request(f"s{step}", short, step))
        step += 1
    # More kept rows than the largest bucket, then small ones again, then a chunked prompt beside decodes.
    requests += [request(f"f{i}", 64, step) for i in range(16)]
    requests += [request("after", 70, step + 1), request("long", 1900, step + 2, 3), request("d", 40, step + 2, 8)]
    return requests


def worst(a: Sequence[Step], b: Sequence[Step]) -> float:
    """Largest relative error over steps and tensors, ``|a - b| / |b|``; the steps must be the same."""
    assert [step.rows for step in a] == [step.rows for step in b]
    errors = [
        ((x.double() - y.double()).norm() / y.double().norm()).item()
        for left, right in zip(a, b)
        for x, y in zip(left.values, right.values)
        if y.numel()
    ]
    assert not np.isnan(errors).any()
    return max(errors)
