"""Drives the reference model, its host and real paged caches step by step, without a scheduler around them.

The configuration, KV cache groups, attention groups and ``InputBatch`` are vLLM's; plan, replay batch, tail and graphs
are this package's, through the reference host's own ``prepare_inputs`` and ``prepare_attn``. A step's inputs are made
once and used in every repetition, as `Stepper` of the tests makes them; pages that hold nothing yet hold NaN.
"""

from __future__ import annotations

import os

# vLLM settles at import whether graphs may have eager breaks.
os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.setdefault("VLLM_PLUGINS", "vllm_ascend_replay")

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
from vllm.utils.network_utils import get_open_port
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.worker.gpu.attn_utils import (
    build_slot_mappings_by_layer,
    get_kv_cache_spec,
    init_attn_backend,
    init_kv_cache,
)
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from vllm_ascend_replay import reference
from vllm_ascend_replay.batch import ReplayBatch
from vllm_ascend_replay.reference.cache import cache_layers
from vllm_ascend_replay.reference.config import write_model

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

if not torch.cuda.is_available():
    # Replaces the buffers that need pinned memory, as vLLM's CPU worker does.
    import vllm.v1.worker.cpu.shm  # noqa: F401

NO_SLOT = -1
STEPS_IN_FLIGHT = 2
"""As vLLM's asynchronous scheduling has; pinned buffers are made for so many."""


def on_gpu() -> bool:
    return torch.cuda.is_available()


def synchronize() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def join_no_one() -> None:
    """The process groups of a server with one rank, which vLLM's graph capture asks for."""
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)


def chunks(lengths: Sequence[int], budget: int) -> list[list[tuple[int, int, int]]]:
    """Steps of at most ``budget`` tokens in order of arrival: ``(request, first position, tokens)`` of each."""
    steps: list[list[tuple[int, int, int]]] = [[]]
    room = budget
    for request, length in enumerate(lengths):
        done = 0
        while done < length:
            if not room:
                steps.append([])
                room = budget
            count = min(room, length - done)
            steps[-1].append((request, done, count))
            done, room = done + count, room - count
    return steps


@dataclass
class Step:
    """One step's inputs, on the device."""

    batch: InputBatch
    block_tables: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    """int64 ``[G, T]``."""
    slots_by_layer: dict[str, torch.Tensor]
    request_states: Any
    """What ``prepare_inputs`` reads of vLLM's request states."""
    ends: int
    """Prompts whose last row is in the step."""


@dataclass
class Requests:
    """Equal prompts, their pages and the steps that prefill them."""

    steps: list[Step]
    tokens: int
    blocks: list[list[np.ndarray]]
    """``[R][G]`` page numbers."""


@dataclass
class Arm:
    """A way to run a step."""

    state: Any
    front_only: bool = False
    """Only the layers before the cut, and the cut layer's KV write."""


class StepHost:
    """One model and its pages; model states of several settings drive it in turn."""

    def __init__(
        self,
        *,
        preset: str = "v41-flash-plan",
        overrides: Mapping[str, Any],
        max_num_tokens: int,
        max_model_len: int,
        max_num_reqs: int,
        block_size: int = 64,
    ) -> None:
        """
        Args:
            preset, overrides: of `write_model`.
            max_num_tokens, max_model_len, max_num_reqs: the engine's limits.
            block_size: tokens in a page of the compressed caches.
        """
        reference.register()
        self.device = torch.device("cuda:0" if on_gpu() else "cpu")
        with tempfile.TemporaryDirectory() as directory, self._environment({"ASCEND_REPLAY": "0"}):
            self.vllm_config = EngineArgs(
                model=str(write_model(directory, preset, **overrides)),
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=False,
                compilation_config={"mode": 0, "cudagraph_mode": "NONE"},
                kv_cache_memory_bytes=1 << 20,
                enable_prefix_caching=True,
                block_size=block_size,
                max_num_seqs=max_num_reqs,
                max_num_batched_tokens=max_num_tokens,
                max_model_len=max_model_len,
                **({} if "dtype" not in overrides else {"dtype": overrides["dtype"]}),
            ).create_engine_config()
        # What the engine core resolves from the backends.
        self.vllm_config.cache_config.kv_cache_layout = "BLHNC"
        self.config = self.vllm_config.model_config.hf_config
        self.max_num_tokens, self.max_model_len, self.max_num_reqs = max_num_tokens, max_model_len, max_num_reqs
        from vllm_ascend_replay.reference.model import ReplayReferenceForCausalLM

        with set_current_vllm_config(self.vllm_config), self.device:
            self.model = ReplayReferenceForCausalLM(vllm_config=self.vllm_config)
            self.groups = get_kv_cache_groups(self.vllm_config, get_kv_cache_spec(self.vllm_config))
        specs = [getattr(group.kv_cache_spec, "first_spec", group.kv_cache_spec) for group in self.groups]
        self.page_tokens = [spec.block_size for spec in specs]
        self.is_ring = [isinstance(spec, CircularBufferSpec) for spec in specs]
        self.tokens = torch.randint(
            0, self.config.vocab_size, (max_num_reqs, max_model_len), dtype=torch.int32, device=self.device
        )

    @staticmethod
    def _environment(settings: Mapping[str, str]) -> Any:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_REPLAY")}
        return mock.patch.dict(os.environ, {**kept, **settings}, clear=True)

    # -- pages --------------------------------------------------------------------------------------------------

    def pages_for(self, num_reqs: int, length: int) -> int:
        """Pages of so many requests of ``length`` tokens, the null page included."""
        return 1 + num_reqs * sum(self._widths(length))

    def _widths(self, length: int) -> list[int]:
        return [1 if ring else -(-length // size) for ring, size in zip(self.is_ring, self.page_tokens)]

    def allocate(self, num_pages: int) -> None:
        """Allocate and bind the pages and make the attention groups, as a worker does."""
        with set_current_vllm_config(self.vllm_config), self.device:
            probe = get_kv_cache_config_from_groups(self.vllm_config, self.groups, 1 << 30)
            stride = probe.kv_cache_tensors[0].size // probe.num_blocks
            self.kv_cache_config = get_kv_cache_config_from_groups(self.vllm_config, self.groups, stride * num_pages)
            self.attn_groups, _, kernel_blocks = init_attn_backend(self.kv_cache_config, self.vllm_config, self.device)
            context = self.vllm_config.compilation_config.static_forward_context
            init_kv_cache(context, self.kv_cache_config, self.device, kernel_blocks, self.vllm_config)
        self.num_pages, self.page_bytes = num_pages, stride
        storage = next(iter(cache_layers(self.vllm_config).values())).kv_cache.untyped_storage()
        # NaN in every floating-point type.
        torch.empty(0, dtype=torch.int16, device=self.device).set_(storage).fill_(0x7FFF)  # type: ignore[call-overload]

    # -- states -------------------------------------------------------------------------------------------------

    def make_state(self, settings: Mapping[str, str]) -> Any:
        """A model state with these ``ASCEND_REPLAY...`` variables; with replay and graphs on, it has captured them."""
        with self._environment(settings), set_current_vllm_config(self.vllm_config), self.device:
            state: Any = self.model.get_model_state_cls()(self.vllm_config, self.model, None, self.device)
            if getattr(state, "replay_graphs", None) is not None:
                widths, zeros = self._widths(self.max_model_len), self._zeros
                tables = SimpleNamespace(
                    get_dummy_block_tables=lambda n: tuple(zeros(n, width) for width in widths),
                    get_dummy_slot_mappings=lambda n: zeros(len(widths), n, dtype=torch.int64).fill_(NO_SLOT),
                )
                buffers = InputBuffers(self.max_num_reqs, self.max_num_tokens, self.device)
                with torch.inference_mode(), freeze_gc_for_cudagraph_capture():
                    state.capture_inner_cudagraphs(buffers, tables, self.attn_groups, self.kv_cache_config)
        for index in range(self.max_num_reqs):
            state.add_request(
                index,
                NewRequestData(
                    req_id=f"r{index}",
                    prompt_token_ids=[0],
                    mm_features=[],
                    sampling_params=SamplingParams(),
                    pooling_params=None,
                    block_ids=(),
                    num_computed_tokens=0,
                    lora_request=None,
                    prefill_token_ids=[0],
                    replay_start=0,
                ),
            )
        return state

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    # -- requests -----------------------------------------------------------------------------------------------

    def requests(self, num_reqs: int, length: int, *, room: int = 0, seed: int = 0) -> Requests:
        """``num_reqs`` prompts of ``length`` tokens on pages in random order.

        Args:
            room: tokens beyond the prompts that the pages hold.
        """
        pages = np.random.default_rng(seed).permutation(np.arange(1, self.num_pages))
        widths = self._widths(length + room)
        blocks = []
        for request in range(num_reqs):
            parts = np.split(pages[request * sum(widths) : (request + 1) * sum(widths)], np.cumsum(widths)[:-1])
            blocks.append(parts)
        steps = [self._step(work, length, blocks) for work in chunks([length] * num_reqs, self.max_num_tokens)]
        return Requests(steps, num_reqs * length, blocks)

    def decode_step(self, requests: Requests, length: int) -> Step:
        """One token behind each of the prompts of ``length`` tokens."""
        return self._step([(r, length, 1) for r in range(len(requests.blocks))], length, requests.blocks)

    def _step(self, work: Sequence[tuple[int, int, int]], prompt: int, blocks: Sequence[Sequence[np.ndarray]]) -> Step:
        at = np.array([request for request, _, _ in work], dtype=np.intp)
        computed = np.array([first for _, first, _ in work], dtype=np.int32)
        lens = np.array([count for _, _, count in work], dtype=np.int32)
        num_reqs, num_tokens = len(work), int(lens.sum())
        starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        owner = np.repeat(np.arange(num_reqs), lens)
        positions = np.concatenate([np.arange(c, c + n) for c, n in zip(computed, lens)])
        slots = np.full((len(self.page_tokens), num_tokens), NO_SLOT, dtype=np.int64)
        tables = []
        for group, (size, width) in enumerate(zip(self.page_tokens, self._widths(self.max_model_len))):
            table = np.zeros((num_reqs, width), dtype=np.int32)
            for row, request in enumerate(at):
                table[row, : len(blocks[request][group])] = blocks[request][group]
            tables.append(torch.from_numpy(table).to(self.device))
            if not self.is_ring[group]:
                slots[group] = table[owner, positions // size].astype(np.int64) * size + positions % size

        def put(values: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, dtype)

        prefilling = computed < prompt
        device_positions, index = put(positions, torch.int64), put(at, torch.int64)
        batch = InputBatch(
            req_ids=[f"r{i}" for i in at],
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs,
            idx_mapping=index,
            idx_mapping_np=at,
            expanded_idx_mapping=index,
            expanded_local_pos=self._zeros(num_reqs),
            num_scheduled_tokens=lens,
            num_tokens=num_tokens,
            num_tokens_after_padding=num_tokens,
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=put(starts),
            query_start_loc_np=starts,
            seq_lens=put(computed + lens),
            seq_lens_cpu_upper_bound=torch.from_numpy(computed + lens),
            dcp_local_seq_lens=None,
            num_computed_tokens_np=computed,
            prefill_len_np=np.full(num_reqs, prompt, dtype=np.int32),
            num_computed_prefill_tokens_np=np.minimum(computed, prompt).astype(np.int32),
            is_prefilling_np=prefilling,
            has_prefill=bool(prefilling.any()),
            decode_graph_eligible=not prefilling.any(),
            input_ids=self.tokens[index[put(owner, torch.int64)], device_positions],
            positions=device_positions,
            is_padding=torch.zeros(num_tokens, dtype=torch.bool, device=self.device),
            logits_indices=put(starts[1:] - 1),
            cu_num_logits=put(np.arange(num_reqs + 1)),
            cu_num_logits_np=np.arange(num_reqs + 1, dtype=np.int32),
            has_structured_output_reqs=False,
            prompt_lens=None,
            max_query_len=int(lens.max()),
        )
        by_index = self._zeros(self.max_num_reqs)
        by_index[index] = put(computed)
        device_slots = put(slots, torch.int64)
        return Step(
            batch=batch,
            block_tables=tuple(tables),
            slots=device_slots,
            slots_by_layer=build_slot_mappings_by_layer(device_slots, self.kv_cache_config),
            request_states=SimpleNamespace(
                num_computed_tokens=SimpleNamespace(gpu=by_index), all_token_ids=SimpleNamespace(gpu=self.tokens)
            ),
            ends=int((computed + lens == prompt).sum()),
        )

    # -- running ------------------------------------------------------------------------------------------------

    def prepare(
        self, step: Step, arm: Arm, *, mode: CUDAGraphMode = CUDAGraphMode.NONE, for_capture: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The host's part before the forward: model inputs and attention metadata; sets the tail's replay batch."""
        batch = step.batch
        inputs = {"input_ids": batch.input_ids, "positions": batch.positions}
        inputs.update(arm.state.prepare_inputs(batch, step.request_states))
        metadata = arm.state.prepare_attn(
            batch,
            mode,
            step.block_tables,
            step.slots,
            self.attn_groups,
            self.kv_cache_config,
            for_capture=for_capture,
        )
        if arm.front_only:
            self.model.tail.batch = ReplayBatch(kept=None)
        return inputs, metadata

    def context(self, step: Step, metadata: dict[str, Any]) -> Any:
        """The forward context of a step."""
        return set_forward_context(
            metadata, self.vllm_config, num_tokens=step.batch.num_tokens, slot_mapping=step.slots_by_layer
        )

    @torch.inference_mode()
    def run(self, step: Step, arm: Arm) -> torch.Tensor:
        """One step; hidden states ``[T, H]``."""
        inputs, metadata = self.prepare(step, arm)
        with self.context(step, metadata):
            return self.model(**inputs)

    def prefill(self, requests: Requests, arm: Arm) -> tuple[list[torch.Tensor], float]:
        """All steps, with two in flight.

        Returns:
            The last rows' hidden states ``[prompts that end, H]`` of each step in which a prompt ends, and the seconds
            that the host was busy: a full launch queue makes it wait, and that counts too.
        """
        running: deque[Any] = deque()
        last, busy = [], 0.0
        for step in requests.steps:
            if len(running) == STEPS_IN_FLIGHT:
                running.popleft().synchronize()
            began = time.perf_counter()
            hidden = self.run(step, arm)
            if step.ends:
                # What a runner samples from.
                last.append(hidden.index_select(0, step.batch.logits_indices)[: step.ends])
            busy += time.perf_counter() - began
            if on_gpu():
                event = torch.cuda.Event()
                event.record()
                running.append(event)
        return last, busy

    @torch.inference_mode()
    def replay_layers_alone(self, requests: Requests, state: Any, *, repeats: int = 20) -> tuple[int, float] | None:
        """Kept rows and seconds of the replay layers of the last step's kept rows, in one graph of nothing else.

        Only the last step is run here: the caches must hold the steps before.

        Args:
            state: plans the rows; without graphs, so that the batch is not padded.
            repeats: of the graph; the median counts.

        Returns:
            ``None`` if the step has no replay batch.
        """
        step, tail = requests.steps[-1], self.model.tail
        inputs, metadata = self.prepare(step, Arm(state))
        batch = tail.batch
        if batch is None or batch.kept is None:
            return None
        kept = batch.kept
        assert kept.num_padded == kept.plan.num_rows
        crossed: list[torch.Tensor] = []

        def note(batch: ReplayBatch, states: Sequence[torch.Tensor]) -> None:
            crossed.extend(kept.gather(states))

        batch.graph = note
        with self.context(step, metadata):
            self.model(**inputs)

            def layers() -> None:
                streams, pre_mix, ids = crossed
                for stage, context in zip(tail.stages, (batch.cut_context, batch.late_context)):
                    with context():
                        streams, pre_mix, _ = tail.run_layers(stage, kept.positions, streams, pre_mix, ids)

            return kept.plan.num_rows, graph_seconds(layers, repeats)

    @torch.inference_mode()
    def full_graph(self, step: Step, arm: Arm) -> Any:
        """A FULL graph of a decode step, as a model runner captures it."""
        inputs, metadata = self.prepare(step, arm, mode=CUDAGraphMode.FULL, for_capture=True)

        def forward() -> None:
            with self.context(step, metadata):
                self.model(**inputs)

        return capture(forward)


def capture(function: Callable[[], Any]) -> Any:
    """A graph of ``function``; without a GPU something that calls it."""
    if not on_gpu():
        return SimpleNamespace(replay=function)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def graph_seconds(function: Callable[[], Any], repeats: int) -> float:
    """Median seconds of ``function`` in one graph."""
    graph, seconds = capture(function), []
    for _ in range(repeats + 2):
        synchronize()
        began = time.perf_counter()
        if on_gpu():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            graph.replay()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])
