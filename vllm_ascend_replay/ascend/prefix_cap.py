"""Prefix hits on vLLM without replay flags (0.30): capped where late layers have no window KV.

There sliding-window blocks are cacheable, and a bounded prompt leaves the late layers' part of its blocks unwritten
below its first kept position `begin`. Two rules keep hits right:

* A **bounded** prompt may hit at most its own `begin`: it reads late window KV from `begin` on only, which it computes
  itself, so what lies below does not matter. The limit goes into the lookup: a window group's hit holds only the blocks
  before its end and cannot be shortened afterwards.
* A prompt that is **not bounded** (too short, or read row by row) reads late window KV below its hit. It may hit any
  block whose late window KV is whole; `Holes` remembers which blocks are not.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from vllm_ascend_replay.ascend.seams import ARCHITECTURE
from vllm_ascend_replay.config import read_settings
from vllm_ascend_replay.layer_plan import LayerPlan, read_layer_plan
from vllm_ascend_replay.model_state import keeps_every_row
from vllm_ascend_replay.plan import bounded_prefills, first_kept


def hit_limit(num_tokens: int, *, keeps_rows: bool, keep_last: int, min_saved: int, align: int) -> int:
    """`begin` of a prompt of `num_tokens` tokens to prefill: its longest harmless hit; 0 if it is not bounded.

    The same numbers decide in the worker's plan. The other arguments are those of `plan.plan_replay`.
    """
    bounded = bounded_prefills(
        prefill_lens=[num_tokens],
        keeps_rows=[keeps_rows],
        replay_start=[0],
        keep_last=keep_last,
        min_saved=min_saved,
        align=align,
    )
    return int(first_kept([num_tokens], keep_last, align)[0]) if bounded[0] else 0


class Holes:
    """Which cached blocks hold late window KV that is missing or was computed with a bounded window.

    A late layer k places after the first sees exact streams from `begin + k * (window - 1)` on, so all late layers'
    window KV equals that of a run without replay from `begin + (late - 1) * (window - 1)` on.
    """

    def __init__(self, plan: LayerPlan) -> None:
        self.spread = (plan.num_late_layers - 1) * (plan.window - 1)
        self.blocks: set[int] = set()
        """Block ids. A block is judged anew whenever it is cached, so an id that was recycled is never stale."""

    def judge(self, block_id: int, first_position: int, begin: int) -> None:
        """A block from `first_position` on was cached by a request with this `begin` (0: not bounded)."""
        if begin and first_position < begin + self.spread:
            self.blocks.add(block_id)
        else:
            self.blocks.discard(block_id)


class HitCap:
    """Bound to one scheduler's KV cache manager."""

    def __init__(self, manager: Any, vllm_config: Any, late_groups: set[int], align: int) -> None:
        """
        Args:
            manager: vLLM's `KVCacheManager`.
            vllm_config: vLLM's configuration.
            late_groups: KV cache groups that hold a late layer's window KV.
            align: alignment of first kept positions, as in the worker.
        """
        plan = read_layer_plan(vllm_config.model_config.hf_text_config)
        settings = read_settings()
        self.keep_last = settings.keep_last(window=plan.window, num_late_layers=plan.num_late_layers)
        self.min_saved, self.align = settings.min_saved, align
        self.manager, self.late_groups, self.holes = manager, late_groups, Holes(plan)
        self._begins: dict[str, int] = {}
        """`begin` by request, as of its last admission: a resumed request counts what it had generated."""
        self._bind()

    def limit(self, request: Any) -> int:
        """`hit_limit` of a vLLM `Request` that is about to be admitted."""
        params = request.sampling_params
        return hit_limit(
            request.num_tokens,
            keeps_rows=params is None or keeps_every_row(params),
            keep_last=self.keep_last,
            min_saved=self.min_saved,
            align=self.align,
        )

    def _bind(self) -> None:
        """Wrap the lookups and the caching of this one manager, on the instances."""
        manager, coordinator, pool = self.manager, self.manager.coordinator, self.manager.block_pool
        real_lookup, real_cache, real_free = manager.get_computed_blocks, pool.cache_full_blocks, manager.free

        @functools.wraps(real_lookup)
        def get_computed_blocks(request: Any) -> Any:
            limit = self._begins[request.request_id] = self.limit(request)
            if limit:
                find = coordinator.find_longest_cache_hit
                coordinator.find_longest_cache_hit = lambda hashes, longest, *args, **kwargs: find(
                    hashes, min(longest, limit), *args, **kwargs
                )
                try:
                    return real_lookup(request)
                finally:
                    del coordinator.find_longest_cache_hit
            get = pool.get_cached_block
            pool.get_cached_block = lambda *args, **kwargs: self._whole(get(*args, **kwargs))
            try:
                return real_lookup(request)
            finally:
                del pool.get_cached_block

        @functools.wraps(real_cache)
        def cache_full_blocks(
            request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
        ) -> Any:
            block_size, group = _arguments(args, kwargs)
            if group in self.late_groups:
                begin = self._begins.get(request.request_id, 0)
                for i in range(num_cached_blocks, num_full_blocks):
                    self.holes.judge(blocks[i].block_id, i * block_size, begin)
            return real_cache(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)

        @functools.wraps(real_free)
        def free(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._begins.pop(request.request_id, None)
            return real_free(request, *args, **kwargs)

        manager.get_computed_blocks, pool.cache_full_blocks, manager.free = get_computed_blocks, cache_full_blocks, free
        boundaries = getattr(coordinator, "get_replay_boundaries", None)
        if boundaries is not None:
            # Sparse retention keeps window blocks only where it expects a later request to resume.
            coordinator.get_replay_boundaries = lambda request: tuple(
                sorted({*boundaries(request), self._begins.get(request.request_id, 0)} - {0})
            )

    def _whole(self, blocks: Any) -> Any:
        """A looked-up block of each group, or `None` (a miss) if one of them is not whole."""
        if blocks is None or any(block.block_id in self.holes.blocks for block in blocks):
            return None
        return blocks


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """`(block_size, kv_cache_group_id)` of a `cache_full_blocks` call."""
    names = ("block_size", "kv_cache_group_id")
    return tuple(args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names))  # type: ignore[return-value]


def installed() -> bool:
    """Whether schedulers of this process cap prefix hits."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return getattr(Scheduler.__init__, "caps_prefix_hits", False)


def install() -> None:
    """Let every scheduler made from now on cap its prefix hits; idempotent.

    The one patch of vLLM: `Scheduler.__init__`, after which the wrappers go on the scheduler's own KV cache manager.
    On vLLM with a bounded-replay flag of its own, window groups are not cacheable while it is on: nothing to do.
    """
    from vllm.config import CacheConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(CacheConfig, "swa_bounded_replay") or installed():
        return
    real = Scheduler.__init__

    @functools.wraps(real)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        real(self, vllm_config, *args, **kwargs)
        cap_scheduler(self, vllm_config)

    init.caps_prefix_hits = True  # type: ignore[attr-defined]
    Scheduler.__init__ = init  # type: ignore[method-assign]


def cap_scheduler(scheduler: Any, vllm_config: Any) -> HitCap | None:
    """Cap the prefix hits of a scheduler whose workers will run decoder replay; `None` where they will not."""
    from vllm_ascend_replay.ascend import off_reason, switched_on

    if ARCHITECTURE not in (getattr(vllm_config.model_config, "architectures", None) or ()):
        return None
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or not switched_on(vllm_config) or off_reason(vllm_config) is not None:
        return None
    plan = read_layer_plan(vllm_config.model_config.hf_text_config)
    late_groups, block = late_window_groups(scheduler.kv_cache_config, plan)
    return HitCap(manager, vllm_config, late_groups, 1 if _lists_rows() else block)


def late_window_groups(kv_cache_config: Any, plan: LayerPlan) -> tuple[set[int], int]:
    """KV cache groups that hold a late layer's window KV, and the positions per block of it.

    A drafter's group is one of them: its KV is made of the late layers' aux states, which have the same holes.
    """
    late = "|".join(map(str, range(plan.cut + 1, plan.num_layers)))
    windows = re.compile(rf"(?:^|\.)(?:layers\.(?:{late})|mtp\.\d+)\.self_attn\.swa_cache$")
    groups, blocks = set(), set()
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            if windows.search(name):
                groups.add(index)
                specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
                blocks.add(int((specs[name] if specs else group.kv_cache_spec).block_size))
    if len(blocks) != 1:
        raise RuntimeError(f"the late layers' window KV lies in blocks of {sorted(blocks)} positions, not of one size")
    return groups, blocks.pop()


def _lists_rows() -> bool:
    """Whether this device's operators take explicit window rows, as `TailLayout.lists_rows` in the worker."""
    from vllm_ascend.device.device_op import DeviceOperator

    return DeviceOperator.get_dsv41_packed_cache_ops() is not None
