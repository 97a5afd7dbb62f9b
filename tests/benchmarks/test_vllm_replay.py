"""vLLM's own replay on the reference model equals this package's where both keep the same rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.models.deepseek_v41.nvidia import model_state as vllm_state

from benchmarks.vllm_replay import BenchmarkModel, BothModelStates
from tests.graphs.conftest import GraphStepper
from tests.support import tape_graphs
from vllm_ascend_replay.reference import model as reference_model
from vllm_ascend_replay.reference.config import write_model

WINDOW = 8
# A row of a matrix product may round otherwise in a batch of another size.
SAME = 1e-5


@pytest.fixture
def stepper_log(monkeypatch, tmp_path):
    """A stepper under policy ``chunk``, which keeps the rows that vLLM's replay keeps, and the log of its graphs."""
    log = tape_graphs.install(monkeypatch)
    monkeypatch.setattr(reference_model, "ReplayReferenceForCausalLM", BenchmarkModel)
    # There are no process groups without an engine.
    monkeypatch.setattr(vllm_state, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True))
    # Late aux states are not handed on by the adapter.
    directory = write_model(tmp_path, hc_sinkhorn_iters=1, aux_hidden_state_layers=())
    stepper = GraphStepper(
        directory,
        settings={"ASCEND_REPLAY_POLICY": "chunk"},
        state_cls=BothModelStates,
        enforce_eager=False,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "PIECEWISE",
            "decoder_replay_cudagraph_capture_sizes": [8, 16],
        },
    )
    # The first batch is a start-up dummy.
    batch, tables, slots = stepper.dummy_inputs(16)
    stepper.state.prepare_attn(batch, None, tables, slots, stepper.attn_groups, stepper.kv_cache_config)
    stepper.capture()
    stepper.state.vllm_tail.batch = None  # where the stepper looks for this package's batch
    return stepper, log


def _run(stepper, log):
    """Prompts in two steps each: reports, and graph pieces that were replayed."""
    reports, replays = [], log.count("replay")
    for lens in ((40,), (21, 33), (30, 5)):
        prompts = [np.random.default_rng([seed, n]).integers(0, 97, n).tolist() for seed, n in enumerate(lens)]
        requests = [stepper.add(prompt) for prompt in prompts]
        reports += [
            stepper.step([(r, r.left // 2 + 1) for r in requests]),
            stepper.step([(r, r.left) for r in requests]),
        ]
        for request in requests:
            stepper.finish(request)
    return reports, log.count("replay") - replays


def test_vllms_replay_agrees_with_policy_chunk(stepper_log):
    stepper, log = stepper_log
    state, runner = stepper.state, SimpleNamespace(model_state=stepper.state)
    ours, replays = _run(stepper, log)
    assert replays
    assert any(report.kept_rows is not None for report in ours)
    graphs = state.vllm_state.replay_cudagraphs
    for used in (graphs, None):
        state.vllm_state.replay_cudagraphs = used
        with state.use_vllm(runner) as stepper.state:
            assert runner.model_state is state.vllm_state
            theirs, replays = _run(stepper, log)
        assert (replays > 0) == (used is not None)
        for mine, vllms in zip(ours, theirs):
            rows = np.arange(mine.num_tokens) if mine.kept_rows is None else mine.kept_rows.numpy()
            assert np.allclose(mine.hidden[rows], vllms.hidden[rows], atol=SAME)
            trimmed = np.setdiff1d(np.arange(mine.num_tokens), rows)
            assert not vllms.hidden[trimmed].any()
    assert runner.model_state is state
    assert state.model.tail is state.replay_tail
