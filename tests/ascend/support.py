"""Shared by the tests of the Ascend host: a session with decoder replay, and the settings around it."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import subprocess
import sys
from importlib import import_module

from tests.npu_emulator import ON_A5, checks
from tests.npu_emulator.rank import Rank
from tests.npu_emulator.session import Session
from tests.npu_emulator.tiny import make_vllm_config

ROOT = pathlib.Path(__file__).parents[2]
ARCHITECTURE = "DeepseekV41ForCausalLM"
LATE_LAYERS, WINDOW, BLOCK = 3, 16, 128
EXACT = 1 + LATE_LAYERS * (WINDOW - 1)
"""Rows that make the tiny model's replay lossless."""


def run_python(*arguments):
    """A Python process of its own, with the repository's modules; what it said and how it ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def first_kept(length, keep_last):
    """First kept position of a bounded prompt of the tiny model."""
    begin = max(length - keep_last, 0)
    return begin if ON_A5 else begin // BLOCK * BLOCK


@contextlib.contextmanager
def settings(**values):
    """ASCEND_REPLAY_* for as long as the context lasts; `settings(keep="exact")`, `settings(enabled=0)`."""
    names = {"enabled": "ASCEND_REPLAY"}
    wanted = {names.get(k, f"ASCEND_REPLAY_{k.upper()}"): str(v) for k, v in values.items() if v is not None}
    before = {k: v for k, v in os.environ.items() if k.startswith("ASCEND_REPLAY")}
    for k in before:
        del os.environ[k]
    os.environ.update(wanted)
    try:
        yield
    finally:
        for k in wanted:
            os.environ.pop(k, None)
        os.environ.update(before)


_originals: dict = {}


def remember_originals():
    """Keeps what vllm-ascend and vLLM are without this package; call before anything registers."""
    import vllm_ascend.models as ascend_models
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins
    from vllm.v1.core.sched.scheduler import Scheduler

    load_general_plugins()
    _originals.update(
        register_model=ascend_models.register_model,
        entry=ModelRegistry.models[ARCHITECTURE],
        scheduler_init=Scheduler.__init__,
    )


def without_package():
    """Puts vllm-ascend and vLLM back to what they are without this package."""
    import vllm_ascend.models as ascend_models
    from vllm import ModelRegistry
    from vllm.v1.core.sched.scheduler import Scheduler

    ascend_models.register_model = _originals["register_model"]
    ModelRegistry.models[ARCHITECTURE] = _originals["entry"]
    Scheduler.__init__ = _originals["scheduler_init"]


def is_untouched():
    """Whether nothing of this package is in vllm-ascend or vLLM."""
    import vllm_ascend.models as ascend_models
    from vllm import ModelRegistry
    from vllm.v1.core.sched.scheduler import Scheduler

    return (
        ascend_models.register_model is _originals["register_model"]
        and ModelRegistry.models[ARCHITECTURE] == _originals["entry"]
        and Scheduler.__init__ is _originals["scheduler_init"]
    )


def holder_of(module_name, path):
    """What holds the last name of `path` in a module, and that name; for rows of `seams`."""
    owner, _, attribute = path.rpartition(".")
    holder = import_module(module_name)
    return (getattr(holder, owner) if owner else holder), attribute


def register():
    """What vLLM does at start-up: vllm-ascend's plugins, then ours."""
    from vllm.plugins import load_general_plugins

    from vllm_ascend_replay import plugin

    load_general_plugins()
    plugin.register()


def make_session(
    *,
    keep=None,
    policy=None,
    min_saved=None,
    graphs=None,
    graph_sizes=None,
    debug=None,
    blocks=256,
    replay=True,
    after_cut=False,
    **config,
):
    """A poisoned session with replay on.

    Args:
        keep, policy, min_saved, graphs, graph_sizes, debug: the settings of those names.
        blocks: KV cache blocks.
        replay: False leaves vllm-ascend without the package.
        after_cut: run the layers after the cut on kept rows and the cut layer in full (the second opinion).
        config: as for `make_vllm_config`.
    """
    from tests.ascend.after_cut import use_after_cut_tail

    checks.forget()
    gc.collect()  # models and caches of earlier sessions hold each other
    without_package()
    names = {"graphs": graphs, "graph_sizes": graph_sizes, "debug": debug}
    with settings(keep=keep, policy=policy, min_saved=min_saved, **names):
        if replay:
            register()
        rank = Rank(make_vllm_config(**config), num_blocks=blocks)
    if after_cut:
        use_after_cut_tail(rank)
    return Session(rank)
