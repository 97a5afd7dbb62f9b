"""FULL decode graphs and bounded prompts: the guard on a runner that picks graphs, with vLLM's own batch state."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.worker.gpu.model_runner import BatchReqState

from vllm_ascend_replay.config import ReplaySettings
from vllm_ascend_replay.model_state import ReplayModelState, forbid_bounded_decode_graphs

WINDOW = 128


def make_state(policy="final", starts=(0, 0, 0, 0), keeps=(False,) * 4, align=1, min_saved=1):
    state = object.__new__(ReplayModelState)
    state.replay_tail = object()
    state.replay_settings = ReplaySettings(policy=policy, min_saved=min_saved)
    state.replay_keep_last = WINDOW
    state.replay_starts_np = np.array(starts, dtype=np.int32)
    state.replay_keeps_rows_np = np.array(keeps)
    state.replay_host = SimpleNamespace(window_align=align)
    return state


def make_batch(computed, prefill_lens, eligible=True):
    """One new token each; ``computed`` of prefill tokens."""
    computed, prefill_lens = np.array(computed, dtype=np.int32), np.array(prefill_lens, dtype=np.int32)
    n, prefilling = len(computed), computed < prefill_lens
    return BatchReqState(
        req_ids=[str(i) for i in range(n)],
        num_scheduled_tokens=np.ones(n, dtype=np.int32),
        num_tokens=n,
        num_draft_tokens_np=None,
        idx_mapping_np=np.arange(n),
        prefill_len_np=prefill_lens,
        num_computed_prefill_tokens_np=computed,
        is_prefilling_np=prefilling,
        max_seq_len_np=None,
        has_prefill=bool(prefilling.any()),
        prefill_runs_as_decode_np=prefilling,
        decode_graph_eligible=eligible,
    )


def make_runner(state, batch):
    class Runner:
        def __init__(self):
            self.model_state = state

        def gather_batch_req_state(self, scheduler_output, dummy_run):
            """As vLLM's: the batch and the tokens of each request of a uniform decode."""
            return (None, 1) if dummy_run else (batch, 1)

    forbid_bounded_decode_graphs(Runner)
    return Runner()


def gather(state, batch, dummy=False):
    return make_runner(state, batch).gather_batch_req_state(object(), dummy)


@pytest.mark.parametrize("computed", [1, 171, 172, 298])
def test_a_row_inside_a_bounded_prompt_runs_eagerly(computed):
    """Below, at and inside the final window [172, 300)."""
    batch = make_batch([300, computed], [300, 300])
    guarded, uniform = gather(make_state(), batch)
    assert (guarded.decode_graph_eligible, uniform) == (False, None)
    # Everything else is the runner's.
    for name in set(batch._fields) - {"decode_graph_eligible"}:
        assert getattr(guarded, name) is getattr(batch, name)


ALLOWED = {
    "decodes only": (make_state(), make_batch([300, 7], [300, 7])),
    "the tail": (make_state(), make_batch([299, 7], [300, 7])),
    "two tails": (make_state(), make_batch([299, 128], [300, 129])),
    "a prompt of a window": (make_state(), make_batch([5], [128])),
    "keeps every row": (make_state(keeps=(True,) * 4), make_batch([5], [300])),
    "a hit that leaves nothing": (make_state(starts=(172, 0, 0, 0)), make_batch([200], [300])),
    "saves too little": (make_state(min_saved=173), make_batch([5], [300])),
    "chunk": (make_state(policy="chunk"), make_batch([5, 200], [300, 300])),
    "not eligible anyway": (make_state(), make_batch([5], [300], eligible=False)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_may_run_in_a_decode_graph_still_does(name):
    state, batch = ALLOWED[name]
    same, uniform = gather(state, batch)
    assert same is batch
    assert uniform == 1


def test_alignment_moves_the_border():
    # First kept position 44 rounded down to 0: nothing is saved, so the prompt is not bounded.
    assert gather(make_state(align=128), make_batch([5], [172]))[1] == 1
    assert gather(make_state(), make_batch([5], [172]))[1] is None


def test_dummy_runs_and_other_states_pass_through():
    assert gather(make_state(), None, dummy=True) == (None, 1)
    batch = make_batch([5], [300])
    assert gather(SimpleNamespace(), batch) == (batch, 1)
    off = make_state()
    off.replay_tail = None
    assert gather(off, batch) == (batch, 1)


def test_it_guards_once_however_often_it_is_asked():
    runner = make_runner(make_state(), make_batch([5], [300]))
    guarded = type(runner).gather_batch_req_state
    forbid_bounded_decode_graphs(type(runner))
    assert type(runner).gather_batch_req_state is guarded
    assert guarded.__name__ == "gather_batch_req_state"
    assert guarded.__doc__.startswith("As vLLM's")


def test_a_runner_that_sends_no_prefill_to_decode_graphs_stays_as_it_is():
    """vLLM 0.30."""

    class Runner:
        pass

    forbid_bounded_decode_graphs(Runner)
    assert not hasattr(Runner, "gather_batch_req_state")


def test_vllms_own_runner_has_the_method_and_the_fields():
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    assert callable(GPUModelRunner.gather_batch_req_state)
    needed = {"decode_graph_eligible", "num_computed_prefill_tokens_np", "prefill_len_np", "is_prefilling_np"}
    assert needed <= set(BatchReqState._fields)
