"""Steps of the reference model whose replay layers run in graphs, on the recording stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
from vllm.v1.worker.gpu.input_batch import InputBuffers

from tests.support import tape_graphs
from tests.support.stepper import NO_SLOT, Stepper, StepReport
from vllm_ascend_replay.reference.config import write_model


class GraphStepper(Stepper):
    """A `Stepper` that can do what a model runner does at the end of start-up: capture."""

    def step(self, *args: Any, **kwargs: Any) -> StepReport:
        with torch.inference_mode():
            return super().step(*args, **kwargs)

    def capture(self) -> None:
        limit = self.vllm_config.scheduler_config.max_num_batched_tokens
        buffers = InputBuffers(self.max_num_reqs, limit, self.device)
        widths = [1 if ring else -(-self.max_model_len // size) for ring, size in zip(self.is_ring, self.block_sizes)]
        tables = SimpleNamespace(
            get_dummy_block_tables=lambda n: tuple(torch.zeros((n, width), dtype=torch.int32) for width in widths),
            get_dummy_slot_mappings=lambda n: torch.full((len(widths), n), NO_SLOT, dtype=torch.int64),
        )
        with torch.inference_mode(), freeze_gc_for_cudagraph_capture():
            self.state.capture_inner_cudagraphs(buffers, tables, self.attn_groups, self.kv_cache_config)


@pytest.fixture
def log(monkeypatch):
    return tape_graphs.install(monkeypatch)


@pytest.fixture
def make_graph_stepper(log, tmp_path):
    """``make(sizes="8,16", **overrides)``: a stepper with graphs of these sizes, captured."""

    def make(sizes: str | None = "8,16,40", settings: dict[str, str] | None = None, capture=True, **options: Any):
        overrides = {"compute_dtype": "float64", **options.pop("model", {})}
        directory = write_model(tmp_path / f"m{len(list(tmp_path.iterdir()))}", **overrides)
        environ = {"ASCEND_REPLAY": "1", **(settings or {})}
        if sizes is not None:
            environ["ASCEND_REPLAY_GRAPH_SIZES"] = sizes
        # Not enforce_eager, as the engine of a device has it; no model graphs.
        stepper = GraphStepper(
            directory,
            settings=environ,
            enforce_eager=False,
            compilation_config={"mode": 0, "cudagraph_mode": "NONE"},
            **options,
        )
        if capture and stepper.state.replay_graphs is not None:
            stepper.capture()
        return stepper

    return make


@pytest.fixture
def tokens():
    rng = np.random.default_rng(5)
    return lambda count: rng.integers(0, 97, count).tolist()
