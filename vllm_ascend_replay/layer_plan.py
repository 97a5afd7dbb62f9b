"""What a DeepSeek-V4.1 configuration says about its layers, as far as replay is concerned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class NotDeepseekV41(ValueError):
    """The configuration is not that of a DeepSeek-V4.1 model."""


@dataclass(frozen=True)
class LayerPlan:
    """Layer indices are zero-based."""

    num_layers: int
    window: int
    """Sliding window in tokens."""
    compress_ratios: tuple[int, ...]
    """``[num_layers]`` tokens per compressed KV entry; 0: sliding window only."""
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidate_source: int
    """Layer whose candidate blocks later index sources are masked to; -1: none."""
    engram_layers: tuple[int, ...]

    @property
    def cut(self) -> int:
        """The cut layer: the last KV source."""
        return max(self.kv_sources)

    @property
    def num_late_layers(self) -> int:
        """Layers after the cut."""
        return self.num_layers - self.cut - 1


_REQUIRED = ("num_hidden_layers", "sliding_window", "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")


def read_layer_plan(config: Any) -> LayerPlan:
    """Read the layer plan of a Hugging Face (text) configuration.

    Raises:
        NotDeepseekV41: a field of DeepSeek-V4.1 is missing or does not fit the others.
    """
    missing = [name for name in _REQUIRED if getattr(config, name, None) in (None, [], ())]
    if missing:
        raise NotDeepseekV41(
            f"the model's configuration ({type(config).__name__}) has no {', '.join(missing)}: "
            "it is not a DeepSeek-V4.1 model"
        )
    layers = int(config.num_hidden_layers)
    ratios = tuple(int(ratio) for ratio in config.compress_ratios)[:layers]
    plan = LayerPlan(
        num_layers=layers,
        window=int(config.sliding_window),
        compress_ratios=ratios,
        kv_sources=tuple(int(i) for i in config.kv_source_layer_ids),
        index_sources=tuple(int(i) for i in config.index_source_layer_ids),
        candidate_source=_layer_or_none(getattr(config, "candidate_source_layer_id", None)),
        engram_layers=tuple(int(i) for i in getattr(config, "engram_layer_ids", None) or ()),
    )
    if len(ratios) != layers:
        raise NotDeepseekV41(f"compress_ratios has {len(ratios)} entries for {layers} layers")
    if plan.window < 1:
        raise NotDeepseekV41(f"sliding_window is {plan.window}: the model has no window")
    if not all(0 <= i < layers for i in plan.kv_sources):
        raise NotDeepseekV41(f"kv_source_layer_ids {list(plan.kv_sources)} do not fit {layers} layers")
    return plan


def _layer_or_none(value: Any) -> int:
    return -1 if value is None else int(value)
