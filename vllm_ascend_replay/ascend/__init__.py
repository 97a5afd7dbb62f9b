"""The vllm-ascend host: its released DeepSeek-V4.1 with decoder replay, without a copied method.

`register` puts a subclass of vllm-ascend's model under the same architecture name and, on vLLM without replay flags of
its own, lets schedulers cap prefix hits. Nothing of vllm-ascend is imported before vLLM asks for the model.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from vllm.logger import init_logger

from vllm_ascend_replay.ascend.seams import ARCHITECTURE, DRAFT_ARCHITECTURE, missing_seam
from vllm_ascend_replay.config import read_settings
from vllm_ascend_replay.support import unsupported_reason

logger = init_logger("vllm.vllm_ascend_replay")


def register() -> None:
    """Register the replay model; called by vLLM in every process, in any order with vllm-ascend's own plugin.

    vllm-ascend's `register_model` runs first and is wrapped, so that a later call of it ends with our model again.
    Where that seam is missing, one warning names it and vllm-ascend stays as it is.
    """
    import vllm_ascend.models as ascend_models

    real = getattr(ascend_models, "register_model", None)
    if real is None:
        logger.warning("decoder replay is off: %s", "vllm_ascend.models has no register_model")
        return
    if not getattr(real, "registers_replay", False):

        @functools.wraps(real)
        def register_model() -> None:
            real()
            _put_replay_model()

        register_model.registers_replay = True  # type: ignore[attr-defined]
        ascend_models.register_model = register_model
    ascend_models.register_model()
    from vllm_ascend_replay.ascend import prefix_cap

    prefix_cap.install()


def _put_replay_model() -> None:
    """Register our class in place of the one vllm-ascend registered."""
    from importlib.metadata import version

    from vllm import ModelRegistry

    from vllm_ascend_replay.ascend import model

    entry = ModelRegistry.models.get(ARCHITECTURE)
    if entry is None or getattr(entry, "module_name", None) == model.__name__:
        return
    if not hasattr(entry, "module_name"):
        logger.warning("decoder replay is off: %s", f"vllm-ascend registers {ARCHITECTURE} in another way")
        return
    model.set_parent(entry.module_name, entry.class_name)
    # vLLM caches what it finds out about a class under its name: the name carries the version it was found with.
    ModelRegistry.register_model(ARCHITECTURE, f"{model.__name__}:{model.class_name(version('vllm-ascend'))}")


def switched_on(vllm_config: Any) -> bool:
    """Whether the user wants decoder replay: our variable, and vLLM's flag where the version has it."""
    return read_settings().enabled and bool(getattr(vllm_config.cache_config, "swa_bounded_replay", True))


def facts(vllm_config: Any) -> SimpleNamespace:
    """What the gate table asks of a model, from the configuration alone."""
    from vllm_ascend_replay.ascend import prefix_cap

    parallel = vllm_config.parallel_config
    engram_layers = getattr(vllm_config.model_config.hf_text_config, "engram_layer_ids", None)
    return SimpleNamespace(
        caps_prefix_hits=prefix_cap.installed(),
        shares_context=True,
        shards_tokens=bool(parallel.use_sequence_parallel_moe or _ascend_option(vllm_config, "enable_dsa_cp")),
        has_engram=bool(engram_layers) and getattr(vllm_config, "engram_config", None) is not None,
        runs_dspark=DRAFT_ARCHITECTURE in _draft_architectures(vllm_config),
        relabels_prefill_as_decode=bool(_ascend_option(vllm_config, "recompute_scheduler_enable")),
    )


def off_reason(vllm_config: Any) -> str | None:
    """Why decoder replay cannot run with this configuration on vllm-ascend; `None` if it can.

    The scheduler's process and the workers ask alike, so it looks at the configuration only, not at a loaded model.
    """
    return unsupported_reason(vllm_config, facts(vllm_config)) or missing_seam()


def _draft_architectures(vllm_config: Any) -> list[str]:
    """What vllm-ascend takes the draft model's configuration for; empty without a draft model."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    return list(getattr(draft, "architectures", None) or ())


def _ascend_option(vllm_config: Any, name: str) -> Any:
    """An option of vllm-ascend's `additional_config`, as given (in any of its sections) or as vllm-ascend made it."""
    options = getattr(vllm_config, "additional_config", None) or {}
    for section in (options, *(v for v in options.values() if isinstance(v, dict))):
        if name in section:
            return section[name]
    try:
        from vllm_ascend.ascend_config import get_ascend_config

        config = get_ascend_config()
    except (ImportError, RuntimeError):
        return None
    for holder in (config, getattr(config, "scheduler_config", None)):
        if hasattr(holder, name):
            return getattr(holder, name)
    return None
