"""vllm-ascend's DeepSeek-V4.1 with its layer loop split at the cut.

The classes are subclasses made when vLLM asks for the model: of the class that vllm-ascend registered, of the language
model class that one names, and of the text model class that one names. No `forward` is copied: while ours is on the
stack, iterating over the layers yields the layers before the cut and then one object that stands for the rest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from vllm_ascend_replay.ascend import off_reason, switched_on
from vllm_ascend_replay.ascend.model_state import make_state_cls
from vllm_ascend_replay.ascend.seams import missing_seam, own_decoder_replay
from vllm_ascend_replay.config import read_settings
from vllm_ascend_replay.layer_plan import read_layer_plan
from vllm_ascend_replay.layouts import WHOLE, GroupRanks, Layout, TokenShards
from vllm_ascend_replay.tail import ReplayTail

logger = init_logger("vllm.vllm_ascend_replay")

_CLASS_PREFIX = "ReplayDeepseekV41ForCausalLM"
_parent = ("vllm_ascend.models.deepseek_v41.vl_model", "AscendDeepseekV41ForCausalLM")


def set_parent(module_name: str, name: str) -> None:
    """Remember the class that vllm-ascend registered: ours derives from it."""
    global _parent
    _parent = (module_name, name)


def class_name(version: str) -> str:
    """Name under which vLLM looks our class up in this module, for one version of vllm-ascend."""
    return f"{_CLASS_PREFIX}_" + "".join(c if c.isalnum() else "_" for c in version)


def __getattr__(name: str) -> Any:
    if not name.startswith(_CLASS_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _model_cls(*_parent)


@functools.cache
def _model_cls(module_name: str, name: str) -> type:
    """Our subclass of vllm-ascend's model class, or that class itself where a seam moved."""
    parent = getattr(import_module(module_name), name)
    reason = missing_seam()
    if reason is None and not hasattr(parent, "language_model_cls"):
        reason = f"this vllm-ascend has no {module_name}.{name}.language_model_cls"
    if reason is not None:
        logger.warning("decoder replay is off: %s", reason)
        return parent
    language_cls = _language_cls(parent.language_model_cls)
    return type(f"Replay{name}", (parent,), {"language_model_cls": language_cls, "__module__": __name__})


def _language_cls(parent: type) -> type:
    def get_model_state_cls(self: Any) -> type:
        state_cls = parent.get_model_state_cls(self)  # type: ignore[attr-defined]
        if self.model.replay_tail is None:
            return state_cls
        own = own_decoder_replay(parent, parent.model_cls, state_cls)  # type: ignore[attr-defined]
        if own is not None:
            logger.warning("decoder replay is off: %s", f"the model has a decoder replay of its own ({own})")
            self.model.drop_tail()
            return state_cls
        return make_state_cls(state_cls)

    methods = {
        "model_cls": _text_cls(parent.model_cls),  # type: ignore[attr-defined]
        "get_model_state_cls": get_model_state_cls,
        "__module__": __name__,
    }
    return type(f"Replay{parent.__name__}", (parent,), methods)


def _text_cls(parent: type) -> type:
    return type(f"Replay{parent.__name__}", (ReplayTextModel, parent), {"__module__": __name__})


class ReplayTextModel:
    """Mixin over vllm-ascend's text model."""

    replay_tail: ReplayTail | None = None

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        if not switched_on(vllm_config):
            return
        plan = read_layer_plan(self.config)  # type: ignore[attr-defined]
        # A number of kept rows below the model's window stops start-up here.
        read_settings().keep_last(window=plan.window, num_late_layers=max(plan.num_late_layers, 0))
        reason = off_reason(vllm_config)
        if reason is not None:
            logger.warning("decoder replay is off: %s", reason)
            return
        layers = list(self.layers)  # type: ignore[has-type]
        self.replay_tail = make_tail(layers, plan.cut, states_layout(vllm_config))
        self.replay_tail.moe_layers_before = moe_layers_before(vllm_config, plan.cut)
        self.layers = SplitLayers(layers, TailLayer(self.replay_tail))

    def place_aux_layers(self) -> None:
        """Tell the tail which aux states are wanted; the runner may settle it after the model was made."""
        assert self.replay_tail is not None
        # The runner counts aux layers from one; a layer's aux state is the streams entering it.
        self.replay_tail.set_aux_layers([i - 1 for i in self.aux_hidden_state_layers])  # type: ignore[attr-defined]

    def drop_tail(self) -> None:
        """Make the model what it would be without this package."""
        self.replay_tail = None
        self.layers = torch.nn.ModuleList(self.layers)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """vllm-ascend's forward; hidden (and aux) rows that were not kept are zero.

        Returns hidden states `[T, H]`, or those and a list of aux states `[T, H]`, as the parent does.
        """
        tail = self.replay_tail
        if tail is None:
            return super().forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]
        self.place_aux_layers()
        with self.layers.split():
            out = super().forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]
        hidden, early_aux = out if isinstance(out, tuple) else (out, [])
        hidden, aux = tail.finish(hidden, early_aux, positions.shape[-1])
        return (hidden, aux) if aux else hidden


def states_layout(vllm_config: Any) -> Layout:
    """How streams, mixes and token ids lie over the tensor-parallel ranks between layers."""
    if not vllm_config.parallel_config.use_sequence_parallel_moe:
        return WHOLE
    return TokenShards(GroupRanks(get_tp_group().device_group))


def moe_layers_before(vllm_config: Any, cut: int) -> int:
    """MoE layers before the cut: what the forward context counts until then, known before a first forward."""
    names = getattr(vllm_config.compilation_config, "static_all_moe_layers", None) or ()
    found = (re.search(r"\blayers\.(\d+)\.", name) for name in names)
    return sum(match is not None and int(match[1]) < cut for match in found)


def make_tail(layers: list[Any], cut: int, layout: Layout = WHOLE) -> ReplayTail:
    """The tail of vllm-ascend's layers; how to call a layer and how to write the cut layer's KV alone."""
    write_kv = functools.partial(write_cut_kv, layers[cut], layout)
    return ReplayTail(layers, cut=cut, run_layer=run_layer, write_kv=write_kv, layout=layout)


def run_layer(
    layer: Any, positions: torch.Tensor, streams: torch.Tensor, pre_mix: torch.Tensor, input_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decoder layer: streams `[N, hc, H]`, pre mix float32 `[N, hc]` -> the same shapes."""
    return layer(positions, streams, pre_mix, None, input_ids=input_ids)


def write_cut_kv(
    layer: Any, layout: Layout, positions: torch.Tensor, streams: torch.Tensor, pre_mix: torch.Tensor
) -> None:
    """Write the cut layer's window KV, compressed KV and index keys of every row, and nothing else.

    The running context's metadata is the whole step's: with compress ratio 1 a row's KV depends on that row alone, and
    the kept rows write none when the layer runs on them. Every rank has the whole cache, so where ranks share the rows
    or the queries, all rows are gathered and the metadata of the whole batch is used.
    """
    metadata = get_forward_context().attn_metadata
    if metadata is None:
        return
    x = layer.hc_pre(streams, layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base, pre_mix)[0]
    x = layout.collect([layer.input_layernorm(x)], positions.shape[-1])[0]
    impl = layer.self_attn.v41_impl
    step = impl._get_layer_metadata(metadata)
    if getattr(step.swa, "global_metadata", None) is not None:
        if hasattr(step.swa, "hidden_restore_idx"):
            x = impl._gather_and_restore_hidden_states(x, step.swa)
        step = impl._global_layer_metadata(metadata)
    impl._update_caches(layer.self_attn, x[: step.swa.num_actual_tokens], step)


class TailLayer:
    """What the model's layer loop sees in place of the layers from the cut on."""

    engram = None
    layer_idx = -2
    """Never an aux layer (those are compared with `layer_idx + 1`): the tail hands out its own."""

    def __init__(self, tail: ReplayTail) -> None:
        self.tail = tail
        self.hc_collapse = tail.layers[-1][1].hc_collapse

    def __call__(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        pre_mix: torch.Tensor,
        llama_4_scaling: Any = None,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tail(positions, hidden_states, pre_mix, input_ids)


class SplitLayers(torch.nn.ModuleList):
    """The model's layers with their names; inside `split`, iteration yields those before the cut and the tail."""

    def __init__(self, layers: list[Any], tail_layer: TailLayer) -> None:
        super().__init__(layers)
        self._tail_layer = tail_layer
        self._splitting = False

    def split(self) -> SplitLayers:
        """Context in which iteration is split."""
        return self

    def __enter__(self) -> None:
        self._splitting = True

    def __exit__(self, *exc: object) -> None:
        self._splitting = False

    def __iter__(self) -> Iterator[Any]:
        layers = super().__iter__()
        if not self._splitting:
            return layers
        return iter([*list(layers)[: self._tail_layer.tail.cut], self._tail_layer])
