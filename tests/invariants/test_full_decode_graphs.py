"""A one-token chunk as a FULL decode graph would run it: every row through the late layers, without kv_start.

No graph is captured here; the state is told that the step runs in one, which is all that it goes by. That the runner
asks the guard is tested in `tests.unit.test_decode_graph_guard`, and on a GPU with real graphs.
"""

from __future__ import annotations

import numpy as np
import pytest
from vllm.config import CUDAGraphMode

from tests.invariants.support import CHUNK, FINAL, check_replay, chunk_floor, final_oracle, run_prompt

LENGTH, WINDOW = 60, 8


@pytest.fixture
def run(make_small, tokens, monkeypatch):
    """``run(settings, computed)``: a prompt in three chunks; the second, one token, as a decode graph runs it."""

    def run_with_graph(settings, computed):
        stepper, oracle = make_small(settings=settings)
        request = stepper.add(tokens(LENGTH + 3), prompt_len=LENGTH)
        stepper.run(request, computed)
        prepare = stepper.state.prepare_attn

        def as_decode_graph(input_batch, cudagraph_mode, *args, **kwargs):
            return prepare(input_batch, CUDAGraphMode.FULL, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(stepper.state, "prepare_attn", as_decode_graph)
            report = stepper.step([(request, 1)])
        assert report.kept_rows is None
        run_prompt(stepper, request)
        return stepper, oracle, request

    return run_with_graph


def forbidden(stepper, request, computed) -> bool:
    at = np.array([request.index])
    return stepper.state.forbids_decode_graph(at, np.array([computed]), np.array([LENGTH]))


@pytest.mark.parametrize("computed", [52, 53, 58])
def test_inside_the_final_window_it_is_wrong_and_forbidden(run, computed):
    stepper, _, request = run(FINAL, computed)
    assert request.logits[LENGTH - 1].isnan().any()
    assert forbidden(stepper, request, computed)


@pytest.mark.parametrize("computed", [1, 30, 51])
def test_before_the_final_window_its_row_is_wrong_and_it_is_forbidden(run, computed):
    """Nobody reads that row again, but nobody should have to know."""
    stepper, oracle, request = run(FINAL, computed)
    assert forbidden(stepper, request, computed)
    assert request.hidden[computed].isnan().all()
    want = final_oracle(stepper, oracle, request)
    np.testing.assert_allclose(request.logits[LENGTH - 1 :], want.logits[LENGTH - 1 :], rtol=0, atol=1e-10)


def test_the_tail_is_right_and_allowed(run):
    stepper, oracle, request = run(FINAL, LENGTH - 1)
    check_replay(request, final_oracle(stepper, oracle, request), stepper.model.cut)
    assert not forbidden(stepper, request, LENGTH - 1)


@pytest.mark.parametrize("computed", [1, 30, 52, 58, 59])
def test_chunk_is_right_and_allowed(run, computed):
    """A one-token chunk is never trimmed, and what it reads was kept."""
    stepper, oracle, request = run(CHUNK, computed)
    chunks = [c for c in (computed, 1, LENGTH - computed - 1) if c]
    want = oracle.run(request.tokens, floors=chunk_floor(stepper, chunks, LENGTH + 3))
    check_replay(request, want, stepper.model.cut)
    assert not forbidden(stepper, request, computed)
