"""Bad input: a clear error at start-up, or one warning and replay off with the outputs of replay off."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm import plugins

from tests.invariants.conftest import SMALL
from tests.invariants.support import FINAL, OFF, keep
from tests.support.stepper import Stepper
from vllm_ascend_replay import plugin
from vllm_ascend_replay.batch import ReplayBuffers
from vllm_ascend_replay.config import SettingError
from vllm_ascend_replay.reference.config import write_model

ROOT = Path(__file__).parents[2]


def write(tmp_path, **overrides):
    return write_model(tmp_path / "model", "tiny", **{"compute_dtype": "float64", **SMALL, **overrides})


# -- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("ASCEND_REPLAY", "on", "0 or 1"),
        ("ASCEND_REPLAY_POLICY", "last", "final or chunk"),
        ("ASCEND_REPLAY_KEEP", "all", "window, exact"),
        ("ASCEND_REPLAY_MIN_SAVED", "-1", "positive whole number"),
        ("ASCEND_REPLAY_KEPT", "window", "there are ASCEND_REPLAY, ASCEND_REPLAY_POLICY"),
    ],
)
def test_a_bad_setting_stops_start_up(monkeypatch, name, value, allowed):
    """Through vLLM's own loading of plugins, which lets the error through."""
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_PLUGINS", "vllm_ascend_replay")
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    with pytest.raises(SettingError) as error:
        plugins.load_general_plugins()
    for part in (name, repr(value), allowed):
        assert part in str(error.value)


@pytest.mark.parametrize("rows", [1, 7])
def test_rows_below_the_window_stop_start_up(tmp_path, rows):
    with pytest.raises(SettingError, match=rf"ASCEND_REPLAY_KEEP is {rows}; .* >= the model's window, 8"):
        Stepper(write(tmp_path), settings=keep(rows))


# -- the model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0; it must be a positive whole number"),
        ({"index_source_layer_ids": (1, 4)}, "every KV source .* must be an index source"),
        ({"kv_source_layer_ids": ()}, "kv_source_layer_ids is empty: without a KV source there is no cut"),
        ({"compress_ratios": (0, 2, 2, 2, 2)}, "cut layer 2 must have ratio 1"),
        ({"engram_layer_ids": (2,)}, "Engram layers must come before the cut"),
    ],
)
def test_a_model_that_does_not_hold_together_is_refused(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path, **overrides)


def run(stepper, tokens) -> list[torch.Tensor]:
    request = stepper.add(tokens(40), prompt_len=35)
    beside = stepper.add(tokens(30, seed=1), prompt_len=28)
    steps = [[(request, 11), (beside, 20)], [(request, 24), (beside, 8)], [(request, 1), (beside, 1)]]
    return [stepper.step(work).hidden.clone() for work in steps]


NO_LATE_LAYER = dict(
    compress_ratios=(0, 2, 2, 2, 1),
    kv_source_layer_ids=(1, 4),
    index_source_layer_ids=(1, 4),
    candidate_source_layer_id=4,
)


@pytest.mark.parametrize(
    ("overrides", "engine", "warning"),
    [
        pytest.param(NO_LATE_LAYER, {}, "no layer comes after the last KV source (layer 4)", id="no layer to trim"),
        # The user's own switch is no fault: nothing is said.
        pytest.param({}, dict(swa_bounded_replay=False), None, id="vLLM's flag is off"),
    ],
)
def test_unsupported_means_replay_off_and_its_outputs(tmp_path, tokens, overrides, engine, warning):
    directory = write(tmp_path, **overrides)
    limits = dict(block_size=4, max_num_tokens=128, max_model_len=64, num_blocks=128, **engine)
    off = Stepper(directory, settings=OFF, **limits)
    logger, records = logging.getLogger("vllm.vllm_ascend_replay"), []
    listener = logging.Handler(logging.WARNING)
    listener.emit = records.append
    logger.addHandler(listener)
    try:
        on = Stepper(directory, settings=FINAL, **limits)
        values = run(on, tokens)
    finally:
        logger.removeHandler(listener)
    said = [record.getMessage() for record in records]
    assert len(said) == (warning is not None)
    assert all(warning in message and message.startswith("decoder replay is off: ") for message in said)
    assert on.state.replay_tail is None
    for mine, plain in zip(values, run(off, tokens)):
        assert torch.equal(mine, plain)


def test_the_model_runner_v1_is_refused_at_start_up(tmp_path):
    from vllm_ascend_replay.reference.model import ReplayReferenceForCausalLM

    made = Stepper(write(tmp_path), settings=OFF)
    config = SimpleNamespace(model_config=made.vllm_config.model_config, use_v2_model_runner=False)
    with pytest.raises(ValueError, match="set VLLM_USE_V2_MODEL_RUNNER=1"):
        ReplayReferenceForCausalLM(vllm_config=config)


# -- KV cache groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 99])
def test_another_number_of_groups_than_at_first(make_small, tokens, groups):
    """Memory profiling may run with other groups than serving: buffers follow, nothing is written past them."""
    stepper, _ = make_small(settings=FINAL)
    want = run(stepper, tokens)
    state, right = stepper.state, stepper.state.replay_buffers
    assert len(right.slot_mappings) == len(stepper.block_sizes)
    state.replay_buffers = ReplayBuffers(state.max_num_reqs, state.max_num_tokens, groups, state.device)
    stepper.reset()
    for got, hidden in zip(run(stepper, tokens), want):
        torch.testing.assert_close(got, hidden, rtol=0, atol=1e-10)
    assert len(state.replay_buffers.slot_mappings) == len(stepper.block_sizes)


# -- vLLM -------------------------------------------------------------------------------------------------------

OLD_VLLM = {
    "no model runner V2": ["v1/worker/gpu_model_runner.py"],
    "no V1 engine": ["worker/model_runner.py"],
    "no breakable graphs": ["v1/worker/gpu/model_states/interface.py", "v1/worker/gpu/input_batch.py"],
}


@pytest.mark.parametrize("name", OLD_VLLM)
def test_an_old_vllm_gets_one_warning_and_no_import_error(tmp_path, name):
    """The plugin beside a vLLM that lacks what replay is built on, in a process that has no other vLLM."""
    for file in ["__init__.py", *OLD_VLLM[name]]:
        path = tmp_path / "vllm" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        for parent in path.relative_to(tmp_path).parents[:-1]:
            (tmp_path / parent / "__init__.py").touch()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.11.0'\n")
    code = "from vllm_ascend_replay.plugin import register; register(); register(); print('started')"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ASCEND_REPLAY")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "started\n"
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("decoder replay is off: vLLM 0.11.0 has no vllm.")
    assert line.endswith("install vLLM 0.30 or later, with Model Runner V2")


def test_this_vllm_has_what_is_needed():
    assert plugin.missing_module() is None
