"""The ``vllm.general_plugins`` entry point: settles the host and registers the model classes."""

from __future__ import annotations

from importlib.util import find_spec

from vllm_ascend_replay.config import read_settings


def register() -> None:
    """Called by vLLM in every process before models are loaded.

    Raises:
        SettingError: a setting has a bad value; start-up stops there.
    """
    settings = read_settings()
    if find_spec("vllm_ascend") is not None:
        if settings.enabled:
            from vllm_ascend_replay import ascend

            ascend.register()
        return
    from vllm_ascend_replay import reference

    reference.register()
