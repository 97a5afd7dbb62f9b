"""The ``vllm.general_plugins`` entry point: settles the host and registers the model classes."""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec

from vllm_ascend_replay.config import read_settings

# A child of vLLM's logger: its handlers and its format. `vllm.logger` itself may be another one in an old vLLM.
logger = logging.getLogger("vllm.vllm_ascend_replay")

NEEDED = (
    "vllm.v1.worker.gpu.model_states.interface",
    "vllm.v1.worker.gpu.input_batch",
    "vllm.compilation.breakable_cudagraph",
)
"""Modules of vLLM that replay is built on: Model Runner V2 with model states, and graphs with eager breaks."""


def register() -> None:
    """Called by vLLM in every process before models are loaded.

    On a vLLM without `NEEDED` it registers nothing and warns once, so that such a server starts as it did before.

    Raises:
        SettingError: a setting has a bad value; start-up stops there.
    """
    settings = read_settings()
    missing = missing_module()
    if missing is not None:
        _warn_once(missing)
        return
    if find_spec("vllm_ascend") is not None:
        if settings.enabled:
            from vllm_ascend_replay import ascend

            ascend.register()
        return
    from vllm_ascend_replay import reference

    reference.register()


def missing_module() -> str | None:
    """The first of `NEEDED` that this vLLM does not have."""
    for name in NEEDED:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return name
    return None


@functools.cache
def _warn_once(missing: str) -> None:
    import vllm

    logger.warning(
        "decoder replay is off: vLLM %s has no %s; install vLLM 0.30 or later, with Model Runner V2",
        getattr(vllm, "__version__", "of unknown version"),
        missing,
    )
