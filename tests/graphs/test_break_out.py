"""Break-outs of PIECEWISE model graphs to replay batches, with and without graphs inside."""

from __future__ import annotations

import pytest

from tests.graphs.conftest import PiecewiseStepper
from tests.graphs.test_graphs import LAYERS, SAME, pairs
from vllm_ascend_replay.config import SettingError

CUT, NUM_LAYERS = 5, 9
LOOKUPS = 1  # the n-gram lookup reads the step's metadata and is a break too


def breaks(stepper):
    return {key.num_tokens: entry.capture.num_eager_breaks for key, entry in stepper.wrapper.entries.items()}


def run_all(stepper, tokens):
    """Chunks without kept rows, mixed steps, decodes, steps with nothing bounded, and one too large for a graph."""
    first = stepper.add(tokens(60), prompt_len=50)
    second = stepper.add(tokens(90), prompt_len=88)
    stepper.run(first, 20, 20)
    stepper.step([(first, 10), (second, 30)])
    third = stepper.add(tokens(30), prompt_logprobs=True)
    stepper.step([(first, 1), (third, 30)])
    stepper.step([(first, 1), (second, 58)])
    stepper.run(first, 1)
    stepper.step([(first, 1), (second, 1)])
    fourth, fifth = stepper.add(tokens(7)), stepper.add(tokens(120))
    stepper.run(fourth)
    stepper.run(fifth)
    stepper.step([(first, 1), (second, 1)])
    return first, second, third, fourth, fifth


@pytest.mark.parametrize("inner", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("aux", [(6, 7, 8), (2, 5, 8)], ids=str)
def test_final_breaks_out_at_every_size(make_graph_stepper, tokens, log, inner, aux):
    settings = {} if inner else {"ASCEND_REPLAY_GRAPHS": "0"}
    model = {"aux_hidden_state_layers": aux}
    stepper = make_graph_stepper(settings=settings, stepper_cls=PiecewiseStepper, model=model)
    eager = make_graph_stepper(settings={"ASCEND_REPLAY_GRAPHS": "0"}, capture=False, model=model)
    assert set(breaks(stepper).values()) == {CUT + LOOKUPS + 1}
    # An aux state from before the cut is alive while the buckets run, so they must not share its pool.
    assert len(log.pools) == (2 if inner and aux[0] < CUT else 1)
    captured = log.count("begin")
    for left, right in zip(run_all(stepper, tokens), run_all(eager, tokens)):
        assert pairs(left, right) < SAME
        trimmed = left.ran & ~left.kept
        assert not left.hidden[trimmed].any()
        assert not any(left.aux[layer][trimmed].any() for layer in aux if layer >= CUT)
    assert log.count("begin") == captured
    assert stepper.null_block_untouched()


def test_chunk_breaks_out_from_the_threshold_on(make_graph_stepper, tokens):
    config = {"decoder_replay_trim_threshold": 24}
    settings = {"ASCEND_REPLAY_POLICY": "chunk"}
    stepper = make_graph_stepper(settings=settings, stepper_cls=PiecewiseStepper, compilation=config)
    # At the threshold exactly one break more than the layers before the cut have; below it every layer has its own.
    whole = NUM_LAYERS + LOOKUPS
    assert breaks(stepper) == {96: whole - LAYERS + 1, 48: whole - LAYERS + 1, 24: whole - LAYERS + 1, 8: whole}
    settings = {**settings, "ASCEND_REPLAY_GRAPHS": "0"}
    eager = make_graph_stepper(settings=settings, capture=False)
    for left, right in zip(run_all(stepper, tokens), run_all(eager, tokens)):
        assert pairs(left, right) < SAME


@pytest.mark.parametrize("threshold", [0, 7, 8])
def test_a_threshold_not_above_the_window_is_refused(make_graph_stepper, threshold):
    config = {"decoder_replay_trim_threshold": threshold}
    with pytest.raises(SettingError, match=f"trim_threshold is {threshold}; allowed: more than the model's window, 8"):
        make_graph_stepper(settings={"ASCEND_REPLAY_POLICY": "chunk"}, capture=False, compilation=config)


def test_capture_and_run_time_must_agree(make_graph_stepper, tokens):
    """Negative control: graphs that were captured without the break never read the batch."""
    stepper = make_graph_stepper(stepper_cls=PiecewiseStepper, capture=False)
    stepper.state.replay_tail.break_out_from = None
    stepper.capture()
    stepper.state.replay_tail.break_out_from = 0
    assert set(breaks(stepper).values()) == {NUM_LAYERS + LOOKUPS}
    request = stepper.add(tokens(40))
    stepper.run(request)
    assert request.hidden[:32].any()
