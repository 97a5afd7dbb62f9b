"""Replay graphs through the real model state, on the recording stand-in: what is captured, and that it is right."""

from __future__ import annotations

import contextlib
import copy
import re

import numpy as np
import pytest
import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.forward_context import get_forward_context

from vllm_ascend_replay import address_guard, stats
from vllm_ascend_replay import graphs as graphs_module
from vllm_ascend_replay.agreement import Agreement
from vllm_ascend_replay.config import SettingError
from vllm_ascend_replay.graphs import GraphError
from vllm_ascend_replay.ladder import default_sizes

WINDOW = 8
SAME = 1e-10  # float64
LAYERS = 4  # from the cut on, in the tiny model


def pairs(left, right):
    """A comparison of two requests' kept rows: the same rows, and the largest difference in them."""
    assert left.kept.tolist() == right.kept.tolist()
    at = np.flatnonzero(left.kept)
    values = [(left.hidden, right.hidden), *((left.aux[i], right.aux[i]) for i in left.aux)]
    return max(float((a[at] - b[at]).abs().max()) for a, b in values)


def test_each_bucket_is_captured_once_the_largest_first(make_graph_stepper, log):
    stepper = make_graph_stepper()
    buckets = stepper.state.replay_graphs.buckets
    assert list(buckets) == [40, 16, 8]
    # A piece before each layer's attention and one after the last, in each of the two stages.
    assert [bucket.pieces for bucket in buckets.values()] == [LAYERS + 2] * 3
    assert log.events[0] == "stream"
    assert log.events[-1] == "stream end"
    assert log.count("stream") == 1
    assert log.count("begin") == log.count("end") == 3 * (LAYERS + 2)
    assert (log.pools, log.outside, log.count("replay")) == ({log.pool}, 0, 0)


def test_the_default_sizes_are_the_ladder(make_graph_stepper):
    stepper = make_graph_stepper(sizes=None, max_num_tokens=64)
    sizes = default_sizes(window=WINDOW, keep_last=WINDOW, max_num_seqs=8, max_num_tokens=64)
    assert sizes == stepper.state.replay_graphs.sizes == list(range(8, 72, 8))


SCHEDULE = [
    # (long prompts, a short one's length): WINDOW rows for each long one, every row of a short one.
    *[(1, 0), (2, 0), (5, 0), (1, 1), (2, 7), (4, 3), (1, 0), (3, 7), (1, 7)],
    (7, 3),  # more rows than the largest bucket
    *[(1, 0), (0, 5)],
]


@pytest.mark.parametrize("settings", [{}, {"ASCEND_REPLAY_DEBUG": "1"}], ids=["whole", "by-piece"])
def test_graphs_equal_eager_runs(make_graph_stepper, log, tokens, settings):
    graphs = make_graph_stepper(settings=settings)
    eager = make_graph_stepper(settings={"ASCEND_REPLAY_GRAPHS": "0"}, capture=False)
    assert eager.state.replay_graphs is None
    captured = log.count("begin")
    stats.reset()
    used = set()
    for round in range(2):
        for long, short in SCHEDULE:
            ids = [tokens(21 + 3 * i) for i in range(long)] + [tokens(short)] * bool(short)
            rows, replays = WINDOW * long + short, log.count("replay")
            both = []
            for stepper in (graphs, eager):
                requests = [stepper.add(prompt) for prompt in ids]
                stepper.step([(request, request.left) for request in requests])
                both.append(requests)
                for request in requests:
                    stepper.finish(request)
            for left, right in zip(*both):
                assert pairs(left, right) < SAME
            ran = log.count("replay") - replays
            in_graph = bool(long) and rows <= 40
            assert ran == (LAYERS + 2 if in_graph else 0)
            if in_graph:
                used.add((min(size for size in (8, 16, 40) if size >= rows), rows in (8, 16, 40)))
        if not round:
            # A cache reset: every page is poisoned.
            graphs.reset()
            eager.reset()
    assert used == {(size, exact) for size in (8, 16, 40) for exact in (True, False)} - {(8, False)}
    assert log.count("begin") == captured
    assert stats.snapshot()["graph_steps"] == 2 * (len(SCHEDULE) - 2)
    assert graphs.null_block_untouched()


def test_chunks_decodes_and_rows_that_only_the_device_knows(make_graph_stepper, tokens):
    graphs, eager = make_graph_stepper(), make_graph_stepper(settings={"ASCEND_REPLAY_GRAPHS": "0"}, capture=False)
    both = []
    for stepper in (graphs, eager):
        first = stepper.add(tokens(60), prompt_len=50)
        second = stepper.add(tokens(90), prompt_len=88)
        third = stepper.add(tokens(30), prompt_logprobs=True)
        stepper.step([(first, 44)])
        stepper.step([(first, 6), (second, 20)])
        stepper.step([(first, 1), (second, 61)])
        # Adaptive verification: the device moves rows from one request's decodes to another's.
        stepper.step([(first, 3), (second, 7), (third, 12)], device_query_lens=[2, 8, 12])
        stepper.step([(first, 1), (second, 1), (third, 18)])
        both.append((first, second, third))
    for left, right in zip(*both):
        assert pairs(left, right) < SAME


def test_padding_is_counted_and_writes_nothing(make_graph_stepper, tokens):
    stepper = make_graph_stepper("24")
    used = {}
    stats.reset()
    request = stepper.add(tokens(30))
    run = stepper.state.replay_graphs

    def watched(batch, states):
        used["slots"], used["rows"] = batch.kept.slot_mappings.clone(), batch.kept.rows.clone()
        return type(run).__call__(run, batch, states)

    build = stepper.state._build_replay

    def built(*args):
        batch = build(*args)
        assert batch.graph is run
        batch.graph = watched
        return batch

    stepper.state._build_replay = built
    stepper.run(request)
    assert used["rows"].tolist() == list(range(22, 30)) + [-1] * 16
    assert (used["slots"][:, 8:] == -1).all()
    counted = stats.snapshot()
    assert (counted["rows_kept"], counted["padded_rows"], counted["graph_steps"]) == (8, 16, 1)


def test_capturing_again_after_steps_writes_no_page(make_graph_stepper, tokens):
    """The slots of the step before must not reach a capture."""
    stepper = make_graph_stepper()
    stepper.run(stepper.add(tokens(50)))
    pages = stepper.pages.clone()
    stepper.capture()
    assert torch.equal(stepper.pages, pages)


# -- the guard ----------------------------------------------------------------------------------------------------


def guarded_step(stepper, eager, tokens, length=25):
    left, right = stepper.add(tokens(length)), eager.add(tokens(length))
    stepper.run(left)
    eager.run(right)
    assert pairs(left, right) < SAME
    stepper.finish(left)
    eager.finish(right)


def replace_weight(stepper):
    layer = stepper.model.layers[7]
    layer.moe.w1 = layer.moe.w1.clone()
    return "layers.7.moe.w1"


def move_weight(stepper):
    layer = stepper.model.layers[6]
    layer.hc_ffn.fn.data = layer.hc_ffn.fn.data.clone()
    return "layers.6.hc_ffn.fn"


def move_positions(stepper):
    buffers = stepper.state.replay_buffers
    fill = buffers.fill

    def elsewhere(*args, **kwargs):
        kept = fill(*args, **kwargs)
        kept.positions = kept.positions.clone()
        return kept

    buffers.fill = elsewhere
    return "positions"


def move_workspace(stepper):
    stepper.workspace = torch.zeros(5)
    return "a workspace"


def lose_workspace(stepper):
    stepper.workspace = None
    return "something that could not be looked at \\(AttributeError: .*\\)"


def replace_attribute(stepper):
    stepper.model.layers[7].moe.scale = torch.ones(3)
    return "layers.7.moe.scale"


def replace_module(stepper):
    layer = stepper.model.layers[7]
    layer.moe = copy.deepcopy(layer.moe)
    return "layers.7.moe.*"


@pytest.fixture(params=["native", "in turn"])
def weights_check(request, monkeypatch):
    """Both ways to look at the weights; in turn, all of them have theirs in every check."""
    if request.param == "in turn":
        monkeypatch.setattr(address_guard, "native_first_moved", lambda: None)
        monkeypatch.setattr(address_guard.WeightsInTurn, "PER_CHECK", 10**6)
    return request.param


MOVES = [
    replace_weight,
    move_weight,
    move_positions,
    move_workspace,
    lose_workspace,
    replace_attribute,
    replace_module,
]


@pytest.mark.usefixtures("weights_check")
@pytest.mark.parametrize("move", MOVES)
def test_a_moved_tensor_turns_the_bucket_off(make_graph_stepper, tokens, log, monkeypatch, move):
    stepper = make_graph_stepper(capture=False)
    stepper.workspace = torch.zeros(5)
    stepper.state.replay_graphs.host.watched["a workspace"] = lambda: stepper.workspace
    # As vllm-ascend keeps scales.
    stepper.model.layers[7].moe.scale = torch.ones(3)
    stepper.capture()
    eager = make_graph_stepper(settings={"ASCEND_REPLAY_GRAPHS": "0"}, capture=False)
    guarded_step(stepper, eager, tokens)
    replays = log.count("replay")
    assert replays == LAYERS + 2
    with torch.inference_mode():
        name = move(stepper)
    errors = []
    monkeypatch.setattr(graphs_module.logger, "error", lambda words, *values: errors.append(words % values))
    for _ in range(2):
        guarded_step(stepper, eager, tokens)
    assert log.count("replay") == replays
    assert len(errors) == 1
    assert "graph of 8 rows is off" in errors[0]
    assert re.search(f": {name} is no longer", errors[0])
    assert [size for size, b in stepper.state.replay_graphs.buckets.items() if b.failed] == [8]


def test_a_weight_that_its_first_forward_moves_is_no_fault(make_graph_stepper, tokens, log, monkeypatch):
    """A layout that is settled lazily: before the first capture, so the graphs read the right memory."""
    stepper = make_graph_stepper(capture=False)
    layer, errors = stepper.model.layers[7], []
    monkeypatch.setattr(graphs_module.logger, "error", lambda words, *values: errors.append(words % values))

    def settle(module, arguments):
        handle.remove()
        module.moe.w1.data = module.moe.w1.data.clone()

    handle = layer.register_forward_pre_hook(settle)
    stepper.capture()
    request = stepper.add(tokens(25))
    stepper.run(request)
    assert log.count("replay") == LAYERS + 2
    assert not errors


def test_a_weight_that_moves_between_captures_turns_the_earlier_buckets_off(make_graph_stepper, monkeypatch):
    stepper = make_graph_stepper(capture=False)
    graphs, layer, errors = stepper.state.replay_graphs, stepper.model.layers[7], []
    monkeypatch.setattr(graphs_module.logger, "error", lambda words, *values: errors.append(words % values))
    capture_bucket = graphs._capture_bucket

    def then_move(bucket, batch, mode):
        if bucket.rows == graphs.sizes[0] and mode != graphs_module.CUDAGraphMode.PIECEWISE:
            layer.moe.w1.data = layer.moe.w1.data.clone()
        capture_bucket(bucket, batch, mode)

    monkeypatch.setattr(graphs, "_capture_bucket", then_move)
    with torch.inference_mode():
        stepper.capture()
    assert [size for size, bucket in graphs.buckets.items() if not bucket.failed] == graphs.sizes[:1]
    assert len(errors) == len(graphs.sizes) - 1
    assert all("layers.7.moe.w1" in error for error in errors)


# -- live metadata ------------------------------------------------------------------------------------------------


def test_breaks_read_the_steps_own_metadata(make_graph_stepper, tokens, monkeypatch):
    graphs, eager = make_graph_stepper(), make_graph_stepper(settings={"ASCEND_REPLAY_GRAPHS": "0"}, capture=False)

    def last_step(stepper, before=lambda: None):
        filler, request = stepper.add(tokens(33)), stepper.add(tokens(40))
        stepper.run(filler, 33)
        before()
        stepper.run(request)
        stepper.finish(filler)
        stepper.finish(request)
        return request

    assert pairs(last_step(graphs), last_step(eager)) < SAME
    # Negative control: a context of an earlier step makes a difference.
    state, stale = graphs.state, []
    build = state.build_replay_batch

    def build_stale(*args):
        batch = build(*args)
        if stale:
            batch.cut_context, batch.late_context = stale[0]
        stale.append((batch.cut_context, batch.late_context))
        return batch

    state.build_replay_batch = build_stale
    assert not pairs(last_step(graphs), last_step(eager)) < 1e-3


def test_the_host_s_late_context_is_not_the_cut_s(make_graph_stepper, tokens):
    """The cut layer's window begins at 0, the late layers' at kv_start: each stage runs in its own context."""
    stepper = make_graph_stepper("8")
    seen = []
    build = stepper.state.build_replay_batch

    def two_contexts(*args):
        batch = build(*args)

        def named(name, inner):
            @contextlib.contextmanager
            def enter():
                with inner():
                    get_forward_context().additional_kwargs["stage"] = name
                    yield

            return enter

        batch.cut_context, batch.late_context = named("cut", batch.cut_context), named("late", batch.late_context)
        return batch

    stepper.state.build_replay_batch = two_contexts
    for index, layer in enumerate(stepper.model.layers[5:], 5):
        write = layer.attn._write

        def noted(*args, index=index, write=write):
            seen.append((index, get_forward_context().additional_kwargs.get("stage")))
            return write(*args)

        layer.attn._write = noted
    stepper.run(stepper.add(tokens(20)))
    # The first entry is the KV write of every row, in the step's own context.
    assert seen == [(5, None), (5, "cut"), (6, "late"), (7, "late"), (8, "late")]


def test_moe_layers_are_counted_from_the_cut(make_graph_stepper, tokens):
    """With torch < 2.11 a MoE layer finds its experts by how many ran before it."""
    stepper = make_graph_stepper("8", capture=False)
    seen = []
    for index, layer in enumerate(stepper.model.layers):
        forward = layer.moe.forward

        def counted(x, index=index, forward=forward):
            context = get_forward_context()
            seen.append((index, context.moe_layer_index))
            context.moe_layer_index += 1
            return forward(x)

        layer.moe.forward = counted
    stepper.run(stepper.add(tokens(20)))
    stepper.capture()
    stepper.run(stepper.add(tokens(20)))
    assert len(seen) > 9 + 2 * LAYERS
    assert all(index == counter for index, counter in seen)


# -- faults of capture --------------------------------------------------------------------------------------------


def test_a_read_back_in_a_piece_is_named(make_graph_stepper):
    stepper = make_graph_stepper(capture=False)
    layer = stepper.model.layers[7]
    forward = layer.moe.forward
    layer.moe.forward = lambda x: forward(x) * (1 if x.sum().item() else 2)
    with pytest.raises(GraphError) as error:
        stepper.capture()
    words = str(error.value)
    assert "graph of 40 rows failed in piece 2, at layer 7" in words
    # What CUDA says depends on whether the capture was ended before.
    assert re.search("operation (not permitted|failed)", words)
    assert "ASCEND_REPLAY_GRAPHS=0" in words
    assert error.value.__cause__ is not None


def test_capture_without_attention_metadata_is_refused(make_graph_stepper):
    stepper = make_graph_stepper(capture=False)
    build = stepper.state.build_replay_batch

    def without(*args):
        batch = build(*args)
        inner = batch.cut_context

        @contextlib.contextmanager
        def enter():
            with inner():
                get_forward_context().attn_metadata = None
                yield

        batch.cut_context = enter
        return batch

    stepper.state.build_replay_batch = without
    with pytest.raises(GraphError, match="no attention metadata"):
        stepper.capture()


def test_debug_names_the_piece_that_fails(make_graph_stepper, tokens):
    stepper = make_graph_stepper("8", settings={"ASCEND_REPLAY_DEBUG": "1"})

    def broken(*_):
        raise RuntimeError("aicore error")

    stepper.model.layers[7].attn._attend = broken
    with pytest.raises(GraphError) as error:
        stepper.run(stepper.add(tokens(20)))
    assert "break 3 of 7 of the decoder replay graph of 8 rows failed, layer 7: RuntimeError: aicore" in str(
        error.value
    )


def test_graphs_of_memory_profiling_are_not_missed(make_graph_stepper, tokens, log):
    """vLLM captures once to measure, drops all graphs, and runs warm-up steps before it captures again."""
    stepper, eager = make_graph_stepper(), make_graph_stepper(settings={"ASCEND_REPLAY_GRAPHS": "0"}, capture=False)
    BreakableCUDAGraphWrapper.clear_all_graphs()
    begun = log.count("begin")
    assert stepper.state._replay_groups is not None
    guarded_step(stepper, eager, tokens)
    assert (log.count("begin"), log.count("replay")) == (begun, 0)
    groups = stepper.state._replay_groups
    stepper.capture()
    assert stepper.state._replay_groups is not groups
    guarded_step(stepper, eager, tokens)
    assert (log.count("begin"), log.count("replay")) == (2 * begun, LAYERS + 2)


# -- sizes --------------------------------------------------------------------------------------------------------


def test_bad_sizes_stop_start_up(make_graph_stepper):
    with pytest.raises(SettingError, match=r"ASCEND_REPLAY_GRAPH_SIZES is '8,513'.*max_num_batched_tokens, 512"):
        make_graph_stepper("8,513")
    with pytest.raises(SettingError, match="decoder_replay_cudagraph_capture_sizes is '600'"):
        make_graph_stepper(compilation={"decoder_replay_cudagraph_capture_sizes": [600]})


def test_the_stream_budget_cuts_the_ladder(make_graph_stepper, monkeypatch):
    made = graphs_module.GraphHost

    def poor(**kwargs):
        return made(**kwargs, streams=40, comm_groups=0)

    monkeypatch.setattr("vllm_ascend_replay.reference.model_state.GraphHost", poor)
    # 6 pieces a bucket.
    stepper = make_graph_stepper("8,16,24,32,40,48,56,64")
    assert list(stepper.state.replay_graphs.buckets) == [64, 48, 40, 24, 16, 8]
    assert sum(bucket.pieces for bucket in stepper.state.replay_graphs.buckets.values()) <= 40


def test_switches(make_graph_stepper):
    off = {"cudagraph_decoder_replay": False}
    assert make_graph_stepper(compilation=off, capture=False).state.replay_graphs is None
    assert make_graph_stepper(enforce_eager=True, capture=False).state.replay_graphs is None


# -- data parallelism ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("other", "size"), [(3, 8), (8, 8), (9, 16), (37, 40), (41, 8)])
def test_every_rank_runs_the_bucket_of_the_largest(make_graph_stepper, tokens, log, other, size):
    stepper, eager = make_graph_stepper(), make_graph_stepper(settings={"ASCEND_REPLAY_GRAPHS": "0"}, capture=False)
    padded = []

    def agree(plan, _):
        return Agreement(True, (plan.num_rows, other))

    replay_batch = stepper.state._replay_batch

    def noted(step, plan, num_padded, rows):
        padded.append((num_padded, list(rows)))
        return replay_batch(step, plan, num_padded, rows)

    stepper.state._agree, stepper.state._replay_batch = agree, noted
    guarded_step(stepper, eager, tokens, 20)
    # Beyond the largest bucket every rank runs its own rows, eagerly.
    assert padded == [(size, [size, size] if other <= 40 else [8, other])]
    assert log.count("replay") == (LAYERS + 2 if other <= 40 else 0)
    # A rank without kept rows takes part with padding alone: a first chunk keeps none.
    request = stepper.add(tokens(60))
    stepper.run(request, 30)
    rank_rows = size if other <= 40 else 1
    assert padded[-1][0] == rank_rows
    assert not request.hidden[:30].any()
    assert stepper.null_block_untouched()
    # A rank whose own bucket failed still pads like the others.
    for bucket in stepper.state.replay_graphs.buckets.values():
        bucket.failed = True
    guarded_step(stepper, eager, tokens, 20)
    assert padded[-1][0] == size
