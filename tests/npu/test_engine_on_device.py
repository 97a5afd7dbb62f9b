"""vllm-ascend's engine on the device: graphs captured and replayed, kept rows against eager, the stream budget.

`NPU_MODEL` names the model's directory. Its weights are random unless `NPU_LOAD_FORMAT` says otherwise, so that any
checkpoint's ``config.json`` is enough; `NPU_ENGINE` holds further arguments of vLLM's ``LLM`` as JSON.
"""

from __future__ import annotations

import json
import os
import random

import pytest

from tests.npu.runs import run_engine, worst

LENGTHS = (129, 130, 255, 257, 450, 706, 1930, 4099)
TOLERANCE = 0.05
"""Of log-probabilities, bfloat16 and another order of sums."""
GRAPHS = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}


@pytest.fixture(scope="module")
def engine():
    model = os.environ.get("NPU_MODEL")
    if not model:
        pytest.skip("NPU_MODEL names no model directory")
    return {
        "model": model,
        "load_format": os.environ.get("NPU_LOAD_FORMAT", "dummy"),
        "skip_tokenizer_init": True,
        "max_model_len": 8192,
        "max_num_batched_tokens": 2048,
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
        **json.loads(os.environ.get("NPU_ENGINE", "{}")),
    }


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(0)
    return [[draw.randrange(3, 32000) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module")
def in_graphs(engine, prompts):
    return run_engine(engine, prompts, 16, **GRAPHS)


@pytest.fixture(scope="module")
def eager(engine, prompts):
    return run_engine(engine, prompts, 16, **GRAPHS, ASCEND_REPLAY_GRAPHS="0")


def test_graphs_are_captured_and_replayed(in_graphs):
    for counted in in_graphs.stats:
        assert counted["replay_steps"]
        assert counted["graph_steps"]
    assert "decoder replay is running" in in_graphs.log


def test_kept_rows_in_graphs_equal_eager(in_graphs, eager):
    assert all(counted["graph_steps"] == 0 for counted in eager.stats)
    assert worst(in_graphs, eager) < TOLERANCE


def test_exact_equals_replay_off(engine, prompts):
    exact = run_engine(engine, prompts, 16, **GRAPHS, ASCEND_REPLAY_KEEP="exact")
    off = run_engine(engine, prompts, 16, **GRAPHS, ASCEND_REPLAY="0")
    assert worst(exact, off) < TOLERANCE


def test_the_ladder_fits_the_devices_streams(in_graphs):
    """A device that runs out of streams fails start-up with 207008; the ladder is cut to what it holds."""
    assert "207008" not in in_graphs.log
    assert "Stream resources are insufficient" not in in_graphs.log
