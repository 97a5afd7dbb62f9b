"""Steps of the reference model whose replay layers run in graphs: the recording stand-in's, or a GPU's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from tests.support import tape_graphs
from tests.support.stepper import NO_SLOT, Stepper, StepReport
from tests.support.tape_graphs import graph_stream
from vllm_ascend_replay.ladder import bucket_for
from vllm_ascend_replay.reference.config import write_model


class GraphStepper(Stepper):
    """A `Stepper` that can do what a model runner does at the end of start-up: capture."""

    def step(self, *args: Any, **kwargs: Any) -> StepReport:
        with torch.inference_mode():
            return super().step(*args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        limit = self.vllm_config.scheduler_config.max_num_batched_tokens
        self.buffers = InputBuffers(self.max_num_reqs, limit, self.device)
        self.widths = [
            1 if ring else -(-self.max_model_len // size) for ring, size in zip(self.is_ring, self.block_sizes)
        ]

    def capture(self) -> None:
        tables = SimpleNamespace(
            get_dummy_block_tables=lambda n: tuple(self._zeros(n, width) for width in self.widths),
            get_dummy_slot_mappings=self._no_slots,
        )
        with torch.inference_mode(), freeze_gc_for_cudagraph_capture():
            self.state.capture_inner_cudagraphs(self.buffers, tables, self.attn_groups, self.kv_cache_config)

    def dummy_inputs(self, num_tokens: int) -> tuple[InputBatch, tuple[torch.Tensor, ...], torch.Tensor]:
        """The batch, block tables and slots that a model graph of ``num_tokens`` rows is captured on."""
        num_reqs = min(num_tokens, self.max_num_reqs)
        tables = tuple(self._zeros(num_reqs, width) for width in self.widths)
        return InputBatch.make_dummy(num_reqs, num_tokens, self.buffers), tables, self._no_slots(num_tokens)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _no_slots(self, num_tokens: int) -> torch.Tensor:
        return self._zeros(len(self.widths), num_tokens, dtype=torch.int64).fill_(NO_SLOT)


class PiecewiseStepper(GraphStepper):
    """Steps run out of PIECEWISE model graphs, padded to the next of `sizes`."""

    sizes: tuple[int, ...] = (8, 24, 48, 96)

    def capture(self) -> None:
        model, state, config = self.model, self.state, self.vllm_config
        limit = max(self.sizes)
        self.ids, self.positions = self._zeros(limit), self._zeros(limit, dtype=torch.int64)
        self.wrapper = BreakableCUDAGraphWrapper(model, config)
        self.mode = CUDAGraphMode.NONE
        with torch.inference_mode(), freeze_gc_for_cudagraph_capture(), graph_stream():
            for size in sorted(self.sizes, reverse=True):
                batch, tables, slots = self.dummy_inputs(size)
                inputs = self._fixed(size, **state.prepare_dummy_inputs(batch.num_reqs, size))
                for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
                    metadata = state.prepare_attn(
                        batch, CUDAGraphMode.NONE, tables, slots, self.attn_groups, self.kv_cache_config
                    )
                    by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
                    with set_forward_context(
                        metadata,
                        config,
                        num_tokens=size,
                        slot_mapping=by_layer,
                        cudagraph_runtime_mode=mode,
                        batch_descriptor=BatchDescriptor(num_tokens=size),
                    ):
                        self.wrapper(**inputs)
        super().capture()
        prepare_attn = state.prepare_attn

        def in_mode(batch: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
            return prepare_attn(batch, self.mode if mode == CUDAGraphMode.NONE else mode, *args, **kwargs)

        state.prepare_attn = in_mode
        self.plain_model = model
        self.model = GraphedModel(self)

    def _fixed(self, size: int, **inputs: Any) -> dict[str, Any]:
        return {**inputs, "input_ids": self.ids[:size], "positions": self.positions[:size]}

    def step(self, work: Any, **kwargs: Any) -> StepReport:
        total = sum(count for _, count in work)
        size = bucket_for(total, self.sizes)
        self.mode = CUDAGraphMode.NONE if size is None else CUDAGraphMode.PIECEWISE
        try:
            return super().step(work, pad_tokens=0 if size is None else size - total, **kwargs)
        finally:
            self.mode = CUDAGraphMode.NONE


class GraphedModel:
    """Stands before the model: runs the graph of the step's size, if there is one."""

    def __init__(self, stepper: PiecewiseStepper) -> None:
        self._stepper = stepper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper.plain_model, name)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, **inputs: Any) -> Any:
        stepper, size = self._stepper, len(positions)
        if stepper.mode == CUDAGraphMode.NONE:
            return stepper.plain_model(input_ids=input_ids, positions=positions, **inputs)
        stepper.ids[:size], stepper.positions[:size] = input_ids, positions
        context = get_forward_context()
        context.cudagraph_runtime_mode = stepper.mode
        context.batch_descriptor = BatchDescriptor(num_tokens=size)
        return stepper.wrapper(**stepper._fixed(size, **inputs))


@pytest.fixture
def log(monkeypatch):
    return tape_graphs.install(monkeypatch)


@pytest.fixture
def make_graph_stepper(log, tmp_path):
    """``make(sizes="8,16", **overrides)``: a stepper with graphs of these sizes, captured."""

    def make(
        sizes: str | None = "8,16,40",
        settings: dict[str, str] | None = None,
        *,
        capture: bool = True,
        stepper_cls: type[GraphStepper] = GraphStepper,
        **options: Any,
    ) -> Any:
        # Few Sinkhorn steps: they are most of the operators, and all alike.
        overrides = {"compute_dtype": "float64", "hc_sinkhorn_iters": 2, **options.pop("model", {})}
        directory = write_model(tmp_path / f"m{len(list(tmp_path.iterdir()))}", **overrides)
        environ = {"ASCEND_REPLAY": "1", **(settings or {})}
        if sizes is not None:
            environ["ASCEND_REPLAY_GRAPH_SIZES"] = sizes
        # Not enforce_eager, as the engine of a device has it.
        mode = "NONE" if stepper_cls is GraphStepper else "PIECEWISE"
        compilation = {"mode": 0, "cudagraph_mode": mode, **options.pop("compilation", {})}
        stepper = stepper_cls(
            directory,
            settings=environ,
            enforce_eager=options.pop("enforce_eager", False),
            compilation_config=compilation,
            **options,
        )
        if capture:
            stepper.capture()
        return stepper

    return make


@pytest.fixture
def tokens():
    """``tokens(count, seed)``: token ids, the same for the same arguments."""
    return lambda count, seed=0: np.random.default_rng([seed, count]).integers(0, 97, count).tolist()
