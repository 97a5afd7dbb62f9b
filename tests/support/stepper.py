"""Drives the real reference model and its real model state step by step, without an engine around them.

The configuration, KV cache groups, pages, attention groups and ``InputBatch`` are vLLM's; the schedule is the test's.
Pages that hold nothing yet, and pages that were freed, hold NaN, so a read that should not happen shows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheConfig, SlidingWindowMLASpec
from vllm.v1.worker.gpu.attn_utils import (
    build_slot_mappings_by_layer,
    get_kv_cache_spec,
    init_attn_backend,
    init_kv_cache,
)
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_ascend_replay import reference
from vllm_ascend_replay.reference.cache import PagedCache, cache_layers

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

if current_platform.is_cpu():
    # Replaces the buffers that need pinned memory, as vLLM's CPU worker does.
    import vllm.v1.worker.cpu.shm  # noqa: F401

NO_SLOT = -1
NULL_BLOCK = 0
# NaN in bfloat16, float32 and float64 alike, whatever a page holds.
POISON = 0x7FFF


@dataclass(eq=False)
class StepperRequest:
    """A request, where it stands, and what came of each of its positions so far."""

    tokens: list[int]
    """Prompt and, after it, the tokens that decodes are forced to have."""
    prompt_len: int
    prompt_logprobs: bool
    index: int = -1
    """Of its state; -1 while it is not running."""
    prefill_len: int = 0
    """``P``: the prompt, after a preemption also what was generated before."""
    computed: int = 0
    replay_start: int = 0
    """First position that a prefix hit replays; 0: no hit."""
    hit: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    """Per KV cache group."""
    ran: np.ndarray = field(default_factory=lambda: np.empty(0))
    """bool ``[L]``: positions that some step computed."""
    kept: np.ndarray = field(default_factory=lambda: np.empty(0))
    """bool ``[L]``: positions whose rows the replay layers ran."""
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """``[L, H]``; NaN where nothing ran."""
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """``[L, vocab]``."""
    aux: dict[int, torch.Tensor] = field(default_factory=dict)
    """Per aux layer ``[L, H]``."""
    entering: dict[int, torch.Tensor] = field(default_factory=dict)
    """Per layer ``[L, hc, H]``: streams that entered it; NaN where it did not run."""

    @property
    def is_prefilling(self) -> bool:
        return self.computed < self.prefill_len

    @property
    def left(self) -> int:
        """Tokens not yet computed, forced decodes included."""
        return len(self.tokens) - self.computed


@dataclass
class StepReport:
    """What one step did."""

    requests: list[StepperRequest]
    """In batch order."""
    query_start_loc: np.ndarray
    """The device boundaries."""
    num_tokens: int
    kept_rows: torch.Tensor | None
    """int64 ``[K]``: batch rows of the replay batch, padding left out; ``None`` without one."""
    skipped: bool
    """Whether the replay layers did not run at all."""
    hidden: torch.Tensor
    """``[T_padded, H]``, as the model returned it."""
    aux: list[torch.Tensor]


class Stepper:
    """One model, its state and its pages, and the requests that run on them."""

    def __init__(
        self,
        directory: str | Path,
        *,
        settings: Mapping[str, str] | None = None,
        state_cls: type | None = None,
        block_size: int = 16,
        max_num_reqs: int = 8,
        max_num_tokens: int = 512,
        max_model_len: int = 1024,
        num_blocks: int = 512,
        seed: int = 0,
        **engine_args: Any,
    ) -> None:
        """
        Args:
            directory: of `write_model`.
            settings: the package's environment variables; default ``ASCEND_REPLAY=0``, replay off.
            state_cls: the model state; default the model's own.
            block_size: tokens in a page of the compressed caches.
            max_num_reqs, max_num_tokens, max_model_len: the engine's limits.
            num_blocks: pages, the null block included; all groups share them.
            seed: order in which pages are handed out.
            engine_args: further arguments of vLLM's ``EngineArgs``.
        """
        reference.register()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_REPLAY")}
        environ = {**kept, "VLLM_USE_V2_MODEL_RUNNER": "1", **(settings or {"ASCEND_REPLAY": "0"})}
        with mock.patch.dict(os.environ, environ, clear=True):
            self.vllm_config = self._configure(
                model=str(directory),
                block_size=block_size,
                max_num_seqs=max_num_reqs,
                max_num_batched_tokens=max_num_tokens,
                max_model_len=max_model_len,
                **engine_args,
            )
            self.config = self.vllm_config.model_config.hf_config
            self.device = torch.device(current_platform.device_type)
            from vllm_ascend_replay.reference.model import ReplayReferenceForCausalLM

            with set_current_vllm_config(self.vllm_config), self.device:
                self.model = ReplayReferenceForCausalLM(vllm_config=self.vllm_config)
                self.model.set_aux_hidden_state_layers(self.config.aux_hidden_state_layers)
                self._allocate(num_blocks)
                cls = state_cls or self.model.get_model_state_cls()
                self.state: Any = cls(self.vllm_config, self.model, None, self.device)
        self.max_num_reqs, self.max_model_len, self._seed = max_num_reqs, max_model_len, seed
        self._entering: list[tuple[int, torch.Tensor]] = []
        for index, layer in enumerate(self.model.layers):
            layer.register_forward_pre_hook(self._watch(index))
        self.reset()

    @staticmethod
    def _configure(**arguments: Any) -> VllmConfig:
        defaults = dict(
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            kv_cache_memory_bytes=1 << 20,
            enable_prefix_caching=True,
        )
        config = EngineArgs(**{**defaults, **arguments}).create_engine_config()
        # What the engine core resolves from the backends.
        config.cache_config.kv_cache_layout = "BLHNC"
        return config

    def _allocate(self, num_blocks: int) -> None:
        """Group the caches, allocate and bind their pages and make the attention groups, as a worker does."""
        groups = get_kv_cache_groups(self.vllm_config, get_kv_cache_spec(self.vllm_config))
        probe = get_kv_cache_config_from_groups(self.vllm_config, groups, 1 << 30)
        stride = probe.kv_cache_tensors[0].size // probe.num_blocks
        self.kv_cache_config: KVCacheConfig = get_kv_cache_config_from_groups(
            self.vllm_config, groups, stride * num_blocks
        )
        self.num_blocks = num_blocks
        assert self.kv_cache_config.num_blocks == num_blocks
        self.attn_groups, _, kernel_blocks = init_attn_backend(self.kv_cache_config, self.vllm_config, self.device)
        context = self.vllm_config.compilation_config.static_forward_context
        init_kv_cache(context, self.kv_cache_config, self.device, kernel_blocks, self.vllm_config)
        self.caches: dict[str, PagedCache] = cache_layers(self.vllm_config)
        storage = next(iter(self.caches.values())).kv_cache.untyped_storage()
        pages = torch.empty(0, dtype=torch.int16, device=self.device).set_(storage)  # type: ignore[call-overload]
        self.pages = pages.view(num_blocks, -1)
        """int16 ``[num_blocks, ...]``: all bytes of each page."""
        specs = [getattr(g.kv_cache_spec, "first_spec", g.kv_cache_spec) for g in groups]
        self.block_sizes = [spec.block_size for spec in specs]
        self.is_window = [isinstance(spec, SlidingWindowMLASpec) for spec in specs]
        self.is_ring = [isinstance(spec, CircularBufferSpec) for spec in specs]
        self.is_cacheable = [g.kv_cache_spec.prefix_cacheable for g in groups]

    def reset(self) -> None:
        """Drop all requests and poison every page."""
        self.pages.fill_(POISON)
        self.rng = np.random.default_rng(self._seed)
        self.free_blocks = list(self.rng.permutation(np.arange(1, self.num_blocks)))
        self.users: dict[int, int] = {}
        self.free_indices = list(range(self.max_num_reqs))
        self.num_requests = 0
        self.req_states = SimpleNamespace(
            num_computed_tokens=SimpleNamespace(gpu=self._zeros(self.max_num_reqs)),
            all_token_ids=SimpleNamespace(gpu=self._zeros(self.max_num_reqs, self.max_model_len)),
        )

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def null_block_untouched(self) -> bool:
        """Whether nothing was ever written to the null block."""
        return bool((self.pages[NULL_BLOCK] == POISON).all())

    # -- requests -----------------------------------------------------------------------------------------------

    def add(
        self,
        tokens: Sequence[int],
        *,
        prompt_len: int | None = None,
        donor: StepperRequest | None = None,
        hit: int = 0,
        prompt_logprobs: bool = False,
    ) -> StepperRequest:
        """A new request.

        Args:
            tokens: prompt and forced decode tokens.
            prompt_len: default all of them.
            donor: a request whose compressed entries of the first ``hit`` tokens are in the prefix cache.
            hit: tokens; a multiple of the block size. A hit that is not longer than the window is no hit.
            prompt_logprobs: every prompt row is read.
        """
        length, config = len(tokens), self.config
        wide = torch.full((length, config.hc_mult, config.hidden_size), torch.nan, dtype=self.model.dtype)
        request = StepperRequest(
            tokens=list(tokens),
            prompt_len=length if prompt_len is None else prompt_len,
            prompt_logprobs=prompt_logprobs,
            ran=np.zeros(length, dtype=bool),
            kept=np.zeros(length, dtype=bool),
            hidden=wide[:, 0].clone(),
            logits=torch.full((length, config.vocab_size), torch.nan, dtype=self.model.dtype),
            aux={layer: wide[:, 0].clone() for layer in self.model.aux_layers},
            entering={layer: wide.clone() for layer in range(self.model.num_layers)},
        )
        self._start(request, request.prompt_len, donor, hit)
        return request

    def preempt(self, request: StepperRequest) -> None:
        """Take a request's pages and its place; `resume` brings it back."""
        for group, blocks in enumerate(request.blocks):
            for block in blocks:
                self._release(block)
            request.blocks[group] = []
        self.free_indices.append(request.index)
        request.index = -1

    finish = preempt

    def resume(self, request: StepperRequest, *, donor: StepperRequest | None = None, hit: int = 0) -> None:
        """Start a preempted request again; what it had computed beyond its prompt is prefilled with it."""
        self._start(request, max(request.prompt_len, request.computed), donor, hit)

    def _start(self, request: StepperRequest, prefill_len: int, donor: StepperRequest | None, hit: int) -> None:
        window = self.config.sliding_window
        request.prefill_len, request.index = prefill_len, self.free_indices.pop(0)
        request.blocks = [[] for _ in self.block_sizes]
        request.hit = hit if hit > window else 0
        request.computed = request.replay_start = max(request.hit - window, 0)
        if request.hit:
            assert donor is not None
            assert hit <= donor.computed
            assert hit < prefill_len
            for group, cacheable in enumerate(self.is_cacheable):
                if cacheable:
                    assert hit % self.block_sizes[group] == 0
                    shared = donor.blocks[group][: hit // self.block_sizes[group]]
                    request.blocks[group] = list(shared)
                    for block in shared:
                        self.users[block] += 1
        ids = torch.tensor(request.tokens, dtype=torch.int32, device=self.device)
        self.req_states.all_token_ids.gpu[request.index, : len(ids)] = ids
        self.num_requests += 1
        self.state.add_request(
            request.index,
            NewRequestData(
                req_id=f"r{self.num_requests}",
                prompt_token_ids=request.tokens[: request.prompt_len],
                mm_features=[],
                sampling_params=SamplingParams(prompt_logprobs=1 if request.prompt_logprobs else None),
                pooling_params=None,
                block_ids=tuple(request.blocks),
                num_computed_tokens=request.computed,
                lora_request=None,
                prefill_token_ids=request.tokens[:prefill_len],
                replay_start=request.replay_start,
            ),
        )

    # -- pages --------------------------------------------------------------------------------------------------

    def _take(self) -> int:
        block = int(self.free_blocks.pop(0))
        self.users[block] = 1
        return block

    def _release(self, block: int) -> None:
        if block == NULL_BLOCK:
            return
        self.users[block] -= 1
        if not self.users[block]:
            self.pages[block].fill_(POISON)
            # Soon used again, which is when a stale read would hurt.
            self.free_blocks.insert(int(self.rng.integers(0, 4)), block)

    def _allocate_up_to(self, request: StepperRequest, length: int) -> None:
        """Give back window pages that no row will read again, then pages for positions below ``length``."""
        unread = max(request.computed - self.config.sliding_window + 1, 0)
        for group, size in enumerate(self.block_sizes):
            blocks = request.blocks[group]
            if self.is_ring[group]:
                if not blocks:
                    blocks.append(self._take())
                continue
            if self.is_window[group]:
                for place in range(min(unread // size, len(blocks))):
                    self._release(blocks[place])
                    blocks[place] = NULL_BLOCK
            while len(blocks) * size < length:
                below = self.is_window[group] and (len(blocks) + 1) * size <= unread
                blocks.append(NULL_BLOCK if below else self._take())

    # -- a step -------------------------------------------------------------------------------------------------

    def run(self, request: StepperRequest, *chunks: int) -> None:
        """Steps of this request alone, of ``chunks`` tokens; without any, one step with all that is left."""
        for chunk in chunks or (request.left,):
            self.step([(request, chunk)])

    def step(
        self,
        work: Sequence[tuple[StepperRequest, int]],
        *,
        pad_tokens: int = 0,
        device_query_lens: Sequence[int] | None = None,
    ) -> StepReport:
        """Run one step.

        Args:
            work: requests and how many tokens of each; run in vLLM's order, decodes first.
            pad_tokens: padding rows at the end, with stale ids and positions.
            device_query_lens: lengths that only the device knows, in the order of the sorted ``work``, when they
                differ from the host's (adaptive verification); the sums are equal.
        """
        work = sorted(work, key=lambda item: (item[1] != 1, item[1]))
        host_lens = np.array([count for _, count in work], dtype=np.int32)
        lens = host_lens if device_query_lens is None else np.array(device_query_lens, dtype=np.int32)
        assert lens.sum() == host_lens.sum()
        requests = [request for request, _ in work]
        for request, count in zip(requests, np.maximum(lens, host_lens)):
            self._allocate_up_to(request, request.computed + int(count))
            self.req_states.num_computed_tokens.gpu[request.index] = request.computed
        batch, block_tables, slots = self._inputs(requests, lens, host_lens, pad_tokens)

        inputs = {"input_ids": batch.input_ids, "positions": batch.positions}
        inputs.update(self.state.prepare_inputs(batch, self.req_states))
        metadata = self.state.prepare_attn(
            batch, CUDAGraphMode.NONE, block_tables, slots, self.attn_groups, self.kv_cache_config
        )
        replay = self.model.tail.batch
        kept_rows = None
        if replay is not None:
            kept_rows = torch.empty(0, dtype=torch.int64) if replay.kept is None else replay.kept.rows.cpu().clone()
        self._entering = []
        with (
            torch.no_grad(),
            set_forward_context(
                metadata,
                self.vllm_config,
                num_tokens=batch.num_tokens_after_padding,
                slot_mapping=build_slot_mappings_by_layer(slots, self.kv_cache_config),
            ),
        ):
            output = self.model(**inputs)
        hidden, aux = output if isinstance(output, tuple) else (output, [])
        report = StepReport(
            requests=requests,
            query_start_loc=np.concatenate(([0], np.cumsum(lens))),
            num_tokens=int(lens.sum()),
            kept_rows=None if kept_rows is None else kept_rows[kept_rows >= 0],
            skipped=replay is not None and replay.kept is None,
            hidden=hidden,
            aux=aux,
        )
        self._record(report, kept_rows)
        for request, count in zip(requests, lens):
            request.computed += int(count)
        return report

    def _inputs(
        self, requests: Sequence[StepperRequest], lens: np.ndarray, host_lens: np.ndarray, pad_tokens: int
    ) -> tuple[InputBatch, tuple[torch.Tensor, ...], torch.Tensor]:
        """The step's ``InputBatch``, block tables per group ``[R, n]`` and slot mappings ``[G, T_padded]``."""
        num_reqs, num_tokens = len(requests), int(lens.sum())
        padded = num_tokens + pad_tokens
        computed = np.array([r.computed for r in requests], dtype=np.int32)
        prefill_len = np.array([r.prefill_len for r in requests], dtype=np.int32)
        owner = np.repeat(np.arange(num_reqs), lens)
        positions = np.concatenate([np.arange(c, c + n) for c, n in zip(computed, lens)])
        ids = np.concatenate([r.tokens[c : c + n] for r, c, n in zip(requests, computed, lens)])

        slots = np.full((len(self.block_sizes), padded), NO_SLOT, dtype=np.int64)
        block_tables = []
        for group, size in enumerate(self.block_sizes):
            width = 1 if self.is_ring[group] else -(-self.max_model_len // size)
            table = np.zeros((num_reqs, width), dtype=np.int32)
            for row, request in enumerate(requests):
                table[row, : len(request.blocks[group])] = request.blocks[group]
            block_tables.append(torch.from_numpy(table).to(self.device))
            if not self.is_ring[group]:
                slots[group, :num_tokens] = table[owner, positions // size].astype(np.int64) * size + positions % size

        def padded_with_stale(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(np.concatenate((values, np.full(pad_tokens, 7)))).to(self.device, dtype)

        def on_device(values: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.from_numpy(values).to(self.device, dtype)

        at = np.array([r.index for r in requests], dtype=np.intp)
        host_starts = np.concatenate(([0], np.cumsum(host_lens))).astype(np.int32)
        prefilling = computed < prefill_len
        batch = InputBatch(
            req_ids=[f"i{r.index}" for r in requests],
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs,
            idx_mapping=on_device(at, torch.int64),
            idx_mapping_np=at,
            expanded_idx_mapping=on_device(at, torch.int64),
            expanded_local_pos=self._zeros(num_reqs),
            num_scheduled_tokens=host_lens,
            num_tokens=num_tokens,
            num_tokens_after_padding=padded,
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            query_start_loc=on_device(np.concatenate(([0], np.cumsum(lens)))),
            query_start_loc_np=host_starts,
            seq_lens=on_device(computed + lens),
            seq_lens_cpu_upper_bound=torch.from_numpy((computed + np.maximum(lens, host_lens)).astype(np.int32)),
            dcp_local_seq_lens=None,
            num_computed_tokens_np=computed,
            prefill_len_np=prefill_len,
            num_computed_prefill_tokens_np=np.minimum(computed, prefill_len),
            is_prefilling_np=prefilling,
            has_prefill=bool(prefilling.any()),
            decode_graph_eligible=not prefilling.any(),
            input_ids=padded_with_stale(ids, torch.int32),
            positions=padded_with_stale(positions, torch.int64),
            is_padding=torch.arange(padded, device=self.device) >= num_tokens,
            logits_indices=on_device(np.cumsum(lens) - 1),
            cu_num_logits=on_device(np.arange(num_reqs + 1)),
            cu_num_logits_np=np.arange(num_reqs + 1, dtype=np.int32),
            has_structured_output_reqs=False,
            prompt_lens=None,
            max_query_len=int(np.maximum(lens, host_lens).max()),
        )
        return batch, tuple(block_tables), torch.from_numpy(slots).to(self.device)

    def _watch(self, index: int) -> Any:
        def note(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            self._entering.append((index, arguments[1].detach().clone()))

        return note

    def _record(self, report: StepReport, kept_rows: torch.Tensor | None) -> None:
        """Sort a step's rows into the requests' positions."""
        logits = self.model.compute_logits(report.hidden).cpu()
        hidden, aux = report.hidden.cpu(), [values.cpu() for values in report.aux]
        kept = np.ones(report.num_tokens, dtype=bool)
        if report.kept_rows is not None:
            kept[:] = False
            kept[report.kept_rows.numpy()] = True
        entering = {}
        for layer, streams in self._entering:
            streams = streams.cpu()
            rows = torch.arange(streams.shape[0])
            if kept_rows is not None and layer >= self.model.cut:
                rows = kept_rows
            real = (rows >= 0) & (rows < report.num_tokens)
            by_row = torch.full((report.num_tokens, *streams.shape[1:]), torch.nan, dtype=streams.dtype)
            by_row[rows[real]] = streams[real]
            entering[layer] = by_row
        for place, request in enumerate(report.requests):
            begin, end = int(report.query_start_loc[place]), int(report.query_start_loc[place + 1])
            at = slice(request.computed, request.computed + end - begin)
            request.ran[at] = True
            request.kept[at] = kept[begin:end]
            request.hidden[at] = hidden[begin:end]
            request.logits[at] = logits[begin:end]
            for layer, values in zip(self.model.aux_layers, aux):
                request.aux[layer][at] = values[begin:end]
            for layer, values in entering.items():
                request.entering[layer][at] = values[begin:end]
