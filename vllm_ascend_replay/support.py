"""Why decoder replay is off: one gate table that the server's warning, the documentation and ``doctor`` read.

A gate is a condition on vLLM's configuration and the model's layer plan. The first one that holds names the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ascend_replay.config import ReplaySettings, SettingError, read_settings
from vllm_ascend_replay.layer_plan import LayerPlan, NotDeepseekV41, read_layer_plan


@dataclass(frozen=True)
class Situation:
    """What a gate may look at."""

    vllm_config: Any
    model: Any
    plan: LayerPlan
    settings: ReplaySettings


@dataclass(frozen=True)
class Gate:
    """One row of the table."""

    name: str
    """Short stable name."""
    reason: str
    """Why replay is off, in the words that the user sees. ``{found}`` stands for what the condition found."""
    found: Callable[[Situation], Any]
    """What was found, or a false value where the gate does not apply."""


def _drafter(s: Situation) -> str:
    """What drafts and why that is a reason; empty where the drafter reads no trimmed row."""
    speculative = s.vllm_config.speculative_config
    method = getattr(speculative, "method", None) if speculative is not None else None
    if method in (None, "ngram", "ngram_gpu"):
        return ""
    reads = f"{method!r} reads rows of the prompt that replay trims"
    if method != "dspark":
        return reads
    if not getattr(s.model, "runs_dspark", False):
        return f"{method!r} is not one that this host runs beside its DeepSeek-V4.1"
    if _sharded(s):
        return f"{method!r} is not supported where sequence or context parallelism shares a step's rows out"
    draft = speculative.draft_model_config.hf_text_config
    window = int(getattr(draft, "sliding_window", None) or 0)
    others = sorted({str(kind) for kind in getattr(draft, "layer_types", None) or ()} - {"sliding_attention"})
    if others:
        return f"{reads}: it has layers of {', '.join(others)}"
    if not 0 < window <= s.plan.window:
        found = f"its window is {window} tokens, the model's {s.plan.window}" if window else "it has no sliding window"
        return f"{reads}: {found}"
    return ""


def _parallel(name: str) -> Callable[[Situation], Any]:
    def found(s: Situation) -> Any:
        size = getattr(s.vllm_config.parallel_config, name, 1)
        return size if size > 1 else 0

    return found


def _prefix_cache_without_cap(s: Situation) -> bool:
    cache = s.vllm_config.cache_config
    return bool(
        cache.enable_prefix_caching
        and not getattr(cache, "swa_bounded_replay", False)
        and not getattr(s.model, "caps_prefix_hits", False)
    )


def _mixed_mode(s: Situation) -> str:
    """How steps with prefills run in model graphs: ``NONE``, ``PIECEWISE`` or ``FULL``."""
    mode = s.vllm_config.compilation_config.cudagraph_mode
    if mode is None or s.vllm_config.model_config.enforce_eager:
        return "NONE"
    return str(mode.mixed_mode().name)


def _mode_name(s: Situation) -> str:
    return str(s.vllm_config.compilation_config.cudagraph_mode.name)


def breakable_graphs_enabled() -> bool:
    """Whether graphs may have eager breaks. vLLM settles it when it is imported."""
    import vllm.envs as envs

    return bool(getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False))


def _device_has_graphs() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.support_static_graph_mode())


def _engram_after_cut(s: Situation) -> list[int]:
    if not getattr(s.model, "has_engram", bool(s.plan.engram_layers)):
        return []
    return [i for i in s.plan.engram_layers if i >= s.plan.cut]


def _sharded(s: Situation) -> bool:
    """Whether ranks hold shares of a step's rows."""
    return bool(getattr(s.model, "shards_tokens", False) or _parallel("prefill_context_parallel_size")(s))


def _skips_dp_coordination(_: Situation) -> bool:
    try:
        from vllm.v1.worker.dp_utils import should_skip_dp_coordination
    except ImportError:
        return False
    return bool(should_skip_dp_coordination())


GATES: tuple[Gate, ...] = (
    Gate(
        "model-runner",
        "Model Runner V1 is in use; set VLLM_USE_V2_MODEL_RUNNER=1",
        lambda s: not getattr(s.vllm_config, "use_v2_model_runner", True),
    ),
    Gate(
        "pipeline-parallel",
        "pipeline parallelism (size {found}) splits the model between the cut and its end",
        _parallel("pipeline_parallel_size"),
    ),
    Gate(
        "decode-context-parallel",
        "decode context parallelism (size {found}) is not supported",
        _parallel("decode_context_parallel_size"),
    ),
    Gate(
        "prefill-context-parallel",
        "prefill context parallelism (size {found}) is not supported for this model",
        lambda s: not getattr(s.model, "shares_context", False) and _parallel("prefill_context_parallel_size")(s),
    ),
    Gate(
        "microbatching",
        "microbatching (dual batch overlap) is not supported; start without --enable-dbo",
        lambda s: getattr(s.vllm_config.parallel_config, "use_ubatching", False),
    ),
    Gate(
        "dp-coordination",
        "the runner skips its data-parallel all-reduce, so ranks cannot agree on a replay batch",
        lambda s: s.vllm_config.parallel_config.data_parallel_size > 1 and _skips_dp_coordination(s),
    ),
    Gate("lora", "LoRA is not supported", lambda s: s.vllm_config.lora_config is not None),
    Gate(
        "prompt-embeds",
        "prompt embeddings are not supported; start without --enable-prompt-embeds",
        lambda s: getattr(s.vllm_config.model_config, "enable_prompt_embeds", False),
    ),
    Gate(
        "no-late-layer",
        "no layer comes after the last KV source (layer {found}), so there is nothing to trim",
        lambda s: s.plan.num_late_layers < 1 and str(s.plan.cut),
    ),
    Gate(
        "late-compression",
        "the cut layer has compress ratio {found}; replay needs 1",
        lambda s: s.plan.compress_ratios[s.plan.cut] != 1 and str(s.plan.compress_ratios[s.plan.cut]),
    ),
    Gate(
        "cut-index-source",
        "the cut layer {found} is not an index source, so its top-k rows cannot be recomputed for the kept rows",
        lambda s: s.plan.cut not in s.plan.index_sources and str(s.plan.cut),
    ),
    Gate(
        "candidate-source",
        "the candidate blocks come from layer {found}, before the cut",
        lambda s: 0 <= s.plan.candidate_source < s.plan.cut and str(s.plan.candidate_source),
    ),
    Gate("late-engram", "Engram runs in layers {found}, at or after the cut", _engram_after_cut),
    Gate("drafter", "the drafter {found}", _drafter),
    Gate(
        "pooling",
        "pooling reads every row",
        lambda s: getattr(s.vllm_config.model_config, "runner_type", "generate") == "pooling",
    ),
    Gate(
        "routed-experts",
        "returned routed experts read every row; start without --enable-return-routed-experts",
        lambda s: getattr(s.vllm_config.model_config, "enable_return_routed_experts", False),
    ),
    Gate(
        "kv-connector",
        "a KV connector may load or store window KV that replay does not have",
        lambda s: s.vllm_config.kv_transfer_config is not None,
    ),
    Gate(
        "recompute-scheduler",
        "vllm-ascend's recompute scheduler runs a prompt's last rows as decodes; start without "
        "recompute_scheduler_enable",
        lambda s: getattr(s.model, "relabels_prefill_as_decode", False),
    ),
    Gate(
        "prefix-cache",
        "prefix caching would cache sliding-window KV with holes; start with --no-enable-prefix-caching, "
        "or on vLLM >= 0.31 without --no-swa-bounded-replay",
        _prefix_cache_without_cap,
    ),
    Gate(
        "mixed-graphs",
        "cudagraph_mode {found} runs prefills in FULL graphs, which do not trim; use FULL_AND_PIECEWISE, "
        "FULL_DECODE_ONLY or NONE",
        lambda s: s.settings.policy == "final" and _mixed_mode(s) == "FULL" and _mode_name(s),
    ),
    Gate(
        "unbreakable-graphs",
        "cudagraph_mode {found} runs prefills in model graphs that cannot break out to a replay batch; set "
        "VLLM_USE_BREAKABLE_CUDAGRAPH=1, or use FULL_DECODE_ONLY or NONE",
        lambda s: _mixed_mode(s) == "PIECEWISE" and not breakable_graphs_enabled() and _mode_name(s),
    ),
    Gate(
        "sharded-model-graphs",
        "cudagraph_mode {found} runs prefills in model graphs, but sequence- and context-parallel states are exchanged "
        "outside graphs; use FULL_DECODE_ONLY or NONE",
        lambda s: _sharded(s) and _mixed_mode(s) != "NONE" and _mode_name(s),
    ),
)
"""Checked in this order."""

GRAPH_GATES: tuple[Gate, ...] = (
    Gate(
        "eager",
        "--enforce-eager asks for no graphs; use cudagraph_mode NONE to have no graphs but these",
        lambda s: s.vllm_config.model_config.enforce_eager,
    ),
    Gate(
        "sharded-states",
        "sequence or context parallelism shards the states that cross the cut, and they are exchanged outside graphs",
        lambda s: _sharded(s),
    ),
    Gate(
        "device-graphs",
        "this device runs no captured graphs",
        lambda s: not _device_has_graphs(),
    ),
    Gate(
        "breakable",
        "graphs with eager breaks are off; set VLLM_USE_BREAKABLE_CUDAGRAPH=1 in the environment of every process",
        lambda s: not breakable_graphs_enabled(),
    ),
    Gate(
        "full-graphs",
        "cudagraph_mode {found} runs prefills in FULL graphs; use FULL_AND_PIECEWISE, FULL_DECODE_ONLY or NONE",
        lambda s: _mixed_mode(s) == "FULL" and _mode_name(s),
    ),
)
"""Why replay graphs are off while replay itself is on and runs eagerly. Checked in this order."""


def gate_reasons(situation: Situation, gates: tuple[Gate, ...] = GATES) -> list[tuple[str, str]]:
    """``(name, reason)`` of every gate that holds, in the table's order."""
    reasons = []
    for gate in gates:
        found = gate.found(situation)
        if found:
            reasons.append((gate.name, gate.reason.format(found=found)))
    return reasons


def unsupported_reason(vllm_config: Any, model: Any) -> str | None:
    """Why decoder replay cannot run with this configuration and model; ``None`` if it can.

    Args:
        vllm_config: vLLM's configuration.
        model: the loaded model or what the host knows of it (its optional attributes ``caps_prefix_hits``,
            ``shards_tokens``, ``shares_context``, ``has_engram``, ``runs_dspark`` and ``relabels_prefill_as_decode``
            are read), or ``None``.
    """
    try:
        plan = read_layer_plan(vllm_config.model_config.hf_text_config)
    except NotDeepseekV41 as error:
        return str(error)
    try:
        settings = read_settings()
        settings.keep_last(window=plan.window, num_late_layers=max(plan.num_late_layers, 0))
    except SettingError as error:
        return str(error)
    reasons = gate_reasons(Situation(vllm_config, model, plan, settings))
    return reasons[0][1] if reasons else None


def graphs_off_reason(vllm_config: Any, model: Any) -> str | None:
    """Why the replay layers run eagerly where decoder replay is on; ``None`` if they can run in graphs.

    Args: as `unsupported_reason`, which must have found nothing.
    """
    plan = read_layer_plan(vllm_config.model_config.hf_text_config)
    reasons = gate_reasons(Situation(vllm_config, model, plan, read_settings()), GRAPH_GATES)
    return reasons[0][1] if reasons else None
