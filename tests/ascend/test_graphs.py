"""Replay graphs on the real vllm-ascend engine, captured and replayed by its own breakable wrapper on recorded graphs.

The emulated operators do not let a row depend on its batch, so graph and eager runs are equal bit for bit, padded or
not. A graph's replay runs nothing but what was recorded, on the tensors of the capture, and graphs of one pool
overwrite each other's memory: what is stale is wrong here.
"""

import contextlib
import logging
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationConfig
from vllm.forward_context import get_forward_context
from vllm_ascend import ascend_forward_context
from vllm_ascend.ascend_forward_context import MoECommType
from vllm_ascend.compilation.breakable_aclgraph import BreakableACLGraphWrapper

from tests.ascend.support import BLOCK, WINDOW, holder_of, make_session
from tests.npu_emulator import ON_A5, patches
from tests.npu_emulator.checks import TIE, report
from tests.npu_emulator.graphs import LOG
from tests.npu_emulator.session import cache_tensors, poison, tokens
from tests.npu_emulator.tiny import DRAFTS, DSPARK
from vllm_ascend_replay import graphs as graphs_module
from vllm_ascend_replay import stats, support
from vllm_ascend_replay.agreement import Agreement
from vllm_ascend_replay.ascend import graphs as ascend_graphs
from vllm_ascend_replay.ascend import seams
from vllm_ascend_replay.graphs import GraphError, choose_sizes
from vllm_ascend_replay.layer_plan import read_layer_plan
from vllm_ascend_replay.support import GRAPH_GATES, Situation, gate_reasons

SIZES = (16, 44, 120)
CUT, LAYERS = 4, 8
PIECES = LAYERS - CUT + 2
"""Of a bucket: one before each attention call and one after the last, in two stages."""
MODEL_SIZES = [2, 8]
on_one_profile = pytest.mark.skipif(ON_A5, reason="nothing here depends on the device: the A2 profile has it")


def start(mode="FULL_DECODE_ONLY", sizes=SIZES, *, capture=True, model_sizes=MODEL_SIZES, **config):
    """A session after start-up, as a server with graphs has it."""
    compilation = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": model_sizes}
    engine = {"enforce_eager": False, "compilation_config": compilation, **config.pop("engine", {})}
    LOG.clear()
    s = make_session(
        graph_sizes=None if sizes is None else ",".join(map(str, sizes)),
        **{"max_tokens": 1024, "engine": engine, **config},
    )
    if capture:
        s.rank.capture()
        poison(s.rank)
    return s


@pytest.fixture(scope="module")
def session():
    """FULL_DECODE_ONLY, the mode that vllm-ascend documents.

    Shared by the tests that come first: another session's start takes over what is process-wide, such as the RoPE
    buffer that FULL graphs read.
    """
    s = start()
    s.capture_log = list(LOG.events), list(LOG.captures)
    return s


def graphs_of(s):
    return s.rank.state.replay_graphs


@contextlib.contextmanager
def eager_but_padded(s):
    """The same padding, without graphs."""
    for bucket in graphs_of(s).buckets.values():
        bucket.failed = True
    yield
    for bucket in graphs_of(s).buckets.values():
        bucket.failed = False


@contextlib.contextmanager
def without_graphs(s):
    graphs, s.rank.state.replay_graphs = graphs_of(s), None
    yield
    s.rank.state.replay_graphs = graphs


def wave(rows, tag):
    """Prompts that arrive together and keep `rows` rows in all, as far as the profile's alignment lets them."""
    if ON_A5:
        # W rows of each long prompt and every row of a short one.
        long = min(max(rows // WINDOW, 1), 7)
        short = rows - long * WINDOW
        lengths = [40 + i for i in range(long)] + [short] * (short > 0)
    else:
        # Rows from a block boundary on.
        assert WINDOW <= rows < WINDOW + BLOCK
        lengths = [BLOCK + rows]
    return {f"{tag}.{i}": tokens(n, 31 * n + i) for i, n in enumerate(lengths)}


def rows_of(s, names):
    """What was computed for each request: its tokens, and every kept row."""
    out = {}
    for name, trace in ((n, s.traces[n]) for n in names):
        kept = [(r.positions[r.keep], r.hidden[r.keep]) for r in trace.rows]
        out[name] = trace.output, torch.cat([p for p, _ in kept]), torch.cat([h for _, h in kept])
    return out


def difference(left, right):
    """Largest difference of two runs' rows; the requests, kept positions and tokens must be the same."""
    assert left.keys() == right.keys()
    worst = 0.0
    for name in left:
        assert left[name][0] == right[name][0], name
        assert torch.equal(left[name][1], right[name][1]), name
        diff = (left[name][2].double() - right[name][2].double()).abs()
        assert not diff.isnan().any(), name
        worst = max(worst, diff.max().item())
    return worst


# ---- capture --------------------------------------------------------------------------------------------------------


def test_each_bucket_is_captured_once_after_the_models_graphs(session):
    events, captures = session.capture_log
    graphs = graphs_of(session)
    assert list(graphs.buckets) == sorted(SIZES, reverse=True)
    assert {b.pieces for b in graphs.buckets.values()} == {PIECES}
    assert all(type(stage) is BreakableACLGraphWrapper for stage in graphs._stages)
    # The model's FULL graphs first, one each; nothing is replayed before serving.
    assert events == ["begin", "end"] * (len(MODEL_SIZES) + PIECES * len(SIZES))
    assert graphs.captures == 1
    streams, pools = zip(*captures)
    # Two captures, two streams: the model's, then ours; one pool.
    assert None not in streams
    assert [len(set(part)) for part in (streams[: len(MODEL_SIZES)], streams[len(MODEL_SIZES) :])] == [1, 1]
    assert set(pools) == {session.rank.runner.cudagraph_manager.pool}
    assert session.rank.runner.cudagraph_manager.graphs
    breaks = [[e.capture.num_eager_breaks for e in stage.entries.values()] for stage in graphs._stages]
    assert breaks == [[1] * len(SIZES), [LAYERS - CUT - 1] * len(SIZES)]
    # No piece waits for parameters that somebody updates behind a replay.
    pieces = [p.__self__ for stage in graphs._stages for e in stage.entries.values() for p in e.capture.segments[::2]]
    assert not any(piece.tasks for piece in pieces)


def test_capture_writes_no_page(session):
    """Neither stale slots of the step before nor the dummy step's own reach a page, block 0 included."""
    session.run(wave(44, "before"), 1024, max_tokens=2)
    runner = session.rank.runner
    layers = session.rank.layers.values()
    pages = [t for layer in layers for t in cache_tensors(getattr(layer, "kv_cache", None))]
    before = [t.view(torch.uint8).clone() for t in pages]
    graphs, events = graphs_of(session), len(LOG.events)
    session.rank.state.capture_inner_cudagraphs(
        runner.input_buffers, runner.block_tables, runner.attn_groups, runner.kv_cache_config
    )
    assert all(torch.equal(a, b.view(torch.uint8)) for a, b in zip(before, pages))
    assert LOG.events[events:] == ["begin", "end"] * (PIECES * len(SIZES))
    assert list(graphs.buckets) == sorted(SIZES, reverse=True)


# ---- equal to eager runs --------------------------------------------------------------------------------------------

# Rows that grow and shrink, exact and padded in every bucket, and more than the largest holds.
ROWS = (16, 17, 44, 120, 43, 128, 45)


def one_step_each(s):
    """Every number of `ROWS` in a step of its own."""
    names = []
    for i, rows in enumerate(ROWS):
        prompts = wave(rows, f"w{i}")
        step = s.run(prompts, 1024, max_tokens=1)[0]
        assert step.kept == rows
        names += prompts
    return rows_of(s, names)


def mixed(s):
    """Chunks, staggered arrivals, decodes beside prefills and in FULL graphs, a preemption, a short prompt."""
    prompts = {k: tokens(n, n) for k, n in {"a": 129, "b": 257, "c": 210, "d": 9, "e": 145}.items()}
    done = []

    def preempt(session):
        if len(session.traces["c"].output) == 2 and not done:
            done.append(True)
            session.preempt("c")

    s.run(prompts, 150, max_tokens=4, arrivals={k: i for i, k in enumerate(prompts)}, each_step=preempt)
    assert done
    return rows_of(s, prompts)


@pytest.mark.parametrize(("schedule", "eagerly"), [(one_step_each, eager_but_padded), (mixed, without_graphs)])
def test_graph_equals_eager_bit_for_bit(session, schedule, eagerly, monkeypatch):
    graphs, captured, replays = graphs_of(session), LOG.count("begin"), LOG.count("replay")
    used, run = set(), graphs._run_stages

    def noted(bucket, batch, mode):
        used.add((bucket.rows, batch.kept.plan.num_rows == bucket.rows))
        return run(bucket, batch, mode)

    monkeypatch.setattr(graphs, "_run_stages", noted)
    stats.reset()
    patches.MOE_CALLS.clear()
    session.reset()
    in_graphs = schedule(session)
    counted, replays = stats.snapshot(), LOG.count("replay") - replays
    assert set(patches.rows_per_layer()) == set(range(LAYERS))
    session.reset()
    with eagerly(session):
        assert difference(in_graphs, schedule(session)) == 0
    if schedule is one_step_each:
        assert used == {(size, exact) for size in SIZES for exact in (True, False)} - {(SIZES[0], False)}
        assert replays == PIECES * counted["graph_steps"] == PIECES * (len(ROWS) - 1)
        assert counted["padded_rows"] == sum(min(s for s in SIZES if s >= r) - r for r in ROWS if r <= SIZES[-1])
    else:
        # Decodes ran in the model's own graphs.
        assert replays > PIECES * counted["graph_steps"] > 3 * PIECES
        for name in in_graphs:
            assert report(session, name).bounded <= TIE
    assert LOG.count("begin") == captured


# ---- padding --------------------------------------------------------------------------------------------------------


def test_padding_rows_are_no_tokens(session, monkeypatch):
    """They have no slot, attention does not see them, and the experts' mask leaves them out; the step's is put back."""
    mask, seen = torch.zeros(1024, dtype=torch.bool), []
    monkeypatch.setattr(ascend_forward_context, "get_mc2_mask", lambda: mask)
    graphs, state = graphs_of(session), session.rank.state
    run, run_batch = graphs._run_stages, state.replay_tail._run_batch

    def noted(bucket, batch, mode):
        for context in (batch.cut_context, batch.late_context):
            with context():
                inner = get_forward_context()
                rows = {(m.num_actual_tokens, m.num_input_tokens) for m in inner.attn_metadata.values()}
                seen.append((rows, inner.additional_kwargs["num_tokens"], mask[:44].nonzero().flatten().tolist()))
        seen.append(bool((batch.kept.slot_mappings[:, 17:] == -1).all() and batch.kept.is_padding[17:].all()))
        return run(bucket, batch, mode)

    def around(batch, *states):
        before = mask.clone()
        out = run_batch(batch, *states)
        seen.append(torch.equal(before, mask))
        return out

    monkeypatch.setattr(graphs, "_run_stages", noted)
    monkeypatch.setattr(state.replay_tail, "_run_batch", around)
    session.run(wave(17, "padded"), 1024, max_tokens=1)
    # In the cut context, in the late one, and afterwards.
    assert seen == [({(17, 44)}, 44, list(range(17)))] * 2 + [True, True]


def test_no_length_is_below_the_rows_it_serves(session, monkeypatch):
    """Padding adds rows, never requests: no length of 0 or -1 reaches an operator, without kept rows neither."""
    state, graphs, seen = session.rank.state, graphs_of(session), []
    run = graphs._run_stages

    def noted(bucket, batch, mode):
        for context in (batch.cut_context, batch.late_context):
            with context():
                for metadata in get_forward_context().attn_metadata.values():
                    rows = torch.diff(metadata.query_start_loc[: metadata.num_reqs + 1])
                    assert bool((rows >= 1).all() and (metadata.seq_lens >= rows).all())
                    assert bool((metadata.cache_seq_lens >= rows).all())
        seen.append((batch.kept.plan.num_rows, bucket.rows, bool((batch.kept.slot_mappings >= 0).any())))
        return run(bucket, batch, mode)

    monkeypatch.setattr(graphs, "_run_stages", noted)
    # Another rank keeps 30 rows in every step.
    monkeypatch.setattr(state, "_agree", lambda plan, ranks: Agreement(True, (plan.num_rows, 30)))
    session.reset()
    session.run({"a": tokens(300, 1), "b": tokens(20, 2)}, 150, max_tokens=2)
    assert (0, 44, False) in seen
    assert any(0 < rows < 44 for rows, _, _ in seen)
    assert all(report(session, name).bounded <= TIE for name in "ab")


# ---- stale metadata -------------------------------------------------------------------------------------------------


def test_breaks_read_the_steps_own_metadata(session, monkeypatch):
    """The same rows over other pages and beside other requests. With an earlier step's contexts they are wrong."""
    state = session.rank.state
    build, stale = state.build_replay_batch, []

    def build_stale(*args):
        batch = build(*args)
        stale.append((batch.cut_context, batch.late_context))
        batch.cut_context, batch.late_context = stale[0]
        return batch

    session.reset()
    prompts = wave(17, "live")
    session.run({"other": tokens(150, 1)}, 1024, max_tokens=2)
    session.run(prompts, 1024, max_tokens=1)
    assert all(report(session, name).bounded <= TIE for name in prompts)
    monkeypatch.setattr(state, "build_replay_batch", build_stale)
    session.run({"first": tokens(144, 1)}, 1024, max_tokens=1)
    try:
        session.run({"second": tokens(150, 2)}, 1024, max_tokens=1)
    except RuntimeError:
        return  # an operator was handed other lengths than its rows have
    r = report(session, "second")
    assert r.nan or r.bounded > TIE


# ---- sizes and gates ------------------------------------------------------------------------------------------------


@pytest.fixture
def messages():
    """What this package logs, in order."""
    records, handler, logger = [], logging.Handler(logging.INFO), logging.getLogger("vllm.vllm_ascend_replay")
    handler.emit = lambda record: records.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.setLevel(level)
    logger.removeHandler(handler)


def sizes_of(session, asked=()):
    """What a start with this session's configuration would capture."""
    settings, config = replace(session.rank.state.replay_settings, graph_sizes=tuple(asked)), session.rank.config
    tail = session.rank.state.replay_tail
    host = ascend_graphs.make_graph_host(config, tail, torch.device("cpu"))
    return choose_sizes(
        settings, config, host, window=WINDOW, keep_last=WINDOW, num_layers=LAYERS - CUT, align=1 if ON_A5 else BLOCK
    )


def test_without_a_setting_the_sizes_are_the_ladder(session):
    """Steps of the window, up to as many prompts' rows as can end in one step, at most 16 windows."""
    top = 8 * WINDOW if ON_A5 else 16 * WINDOW
    assert sizes_of(session) == list(range(WINDOW, top + 1, WINDOW))


def test_the_stream_budget_cuts_the_ladder(session, messages, monkeypatch):
    """Streams less those of the model's graphs, over the pieces of a bucket."""
    monkeypatch.setattr(ascend_graphs, "STREAMS", 5 * PIECES + len(MODEL_SIZES) + 1)
    assert sizes_of(session, range(16, 144, 16)) == [16, 32, 64, 96, 128]
    assert any("hold 5 decoder replay graphs of 6 pieces" in m for m in messages)


def test_the_models_graphs_count(session):
    config, tail, pieces = session.rank.config, session.rank.state.replay_tail, {}
    mode = type(config.compilation_config.cudagraph_mode)
    for name in ("NONE", "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE"):
        compilation = SimpleNamespace(cudagraph_mode=mode[name], cudagraph_capture_sizes=[1, 2, 4])
        changed = SimpleNamespace(
            compilation_config=compilation, model_config=config.model_config, speculative_config=None
        )
        pieces[name] = ascend_graphs.model_pieces(changed, tail)
    piecewise = 3 * (CUT + 2)
    assert pieces == {"NONE": 0, "FULL_DECODE_ONLY": 3, "PIECEWISE": piecewise, "FULL_AND_PIECEWISE": piecewise + 3}


def test_sizes_whose_experts_go_through_the_host_run_eagerly(session, messages, monkeypatch):
    """All-to-all reads row counts back: those sizes are not captured, and their batches run as they are."""
    real = ascend_forward_context.select_moe_comm_method

    def select(num_tokens, vllm_config):
        return MoECommType.ALLTOALL if num_tokens > 44 else real(num_tokens, vllm_config)

    monkeypatch.setattr(ascend_forward_context, "select_moe_comm_method", select)
    assert sizes_of(session, SIZES) == [16, 44]
    assert "replay batches of 120 rows run eagerly: no graph can hold them" in messages


def test_gates_say_why_the_layers_run_eagerly(session, messages, monkeypatch):
    state, config = copy(session.rank.state), session.rank.config

    def reason():
        messages.clear()
        state.replay_graphs = None
        state._turn_graphs_on(state.replay_tail)
        assert state.replay_tail is not None
        if state.replay_graphs is not None:
            return "on"
        return [m.partition("eagerly, not in graphs: ")[2] for m in messages]

    assert reason() == "on"
    with monkeypatch.context() as m:
        m.setattr(state, "replay_settings", replace(state.replay_settings, graphs=False))
        assert reason() == []
    with monkeypatch.context() as m:
        m.setattr(config.model_config, "enforce_eager", True)
        assert reason() == ["--enforce-eager asks for no graphs; use cudagraph_mode NONE to have no graphs but these"]
    with monkeypatch.context() as m:
        m.setattr(support, "breakable_graphs_enabled", lambda: False)
        assert "VLLM_USE_BREAKABLE_CUDAGRAPH=1" in reason()[0]
    with monkeypatch.context() as m:
        m.setattr("vllm_ascend.worker.v2.utils.communicator_switch", None)
        assert reason() == ["this vllm-ascend has no vllm_ascend.worker.v2.utils.communicator_switch"]


def test_sharded_states_have_no_graphs(session):
    plan = read_layer_plan(session.rank.config.model_config.hf_text_config)
    settings = session.rank.state.replay_settings
    situation = Situation(session.rank.config, SimpleNamespace(shards_tokens=True), plan, settings)
    assert [name for name, _ in gate_reasons(situation, GRAPH_GATES)] == ["sharded-states"]


@pytest.mark.parametrize("seam", seams.GRAPH_SEAMS, ids=lambda seam: seam[1])
def test_a_moved_graph_seam_is_named(seam, monkeypatch):
    module_name, path, names = seam
    holder, attribute = holder_of(module_name, path)
    monkeypatch.setattr(holder, attribute, None)
    assert f"{module_name}.{path}" in seams.missing_seam(seams.GRAPH_SEAMS)
    assert seams.missing_seam() is None or path == "AscendInputBatch.make_dummy"
    monkeypatch.undo()
    assert seams.missing_seam(seams.GRAPH_SEAMS) is None
    if names:
        monkeypatch.setattr(holder, attribute, lambda unrelated: None)
        assert names[0] in seams.missing_seam(seams.GRAPH_SEAMS)


def test_what_is_patched_is_where_it_was():
    """`capture_model` must go through the graph manager, which is where the replay graphs are put in."""
    import inspect

    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm_ascend.worker.v2.aclgraph_utils import ModelAclGraphManager

    source = inspect.getsource(inspect.unwrap(GPUModelRunner.capture_model))
    model, speculator = source.index("self.cudagraph_manager.capture("), source.index("self.speculator.capture()")
    assert model < speculator
    assert "communicator_switch()" in inspect.getsource(ModelAclGraphManager.capture)


# ---- sessions of their own ------------------------------------------------------------------------------------------


def test_without_graphs_of_the_model():
    s = start("NONE", sizes=(16, 44))
    assert LOG.events == ["begin", "end"] * (2 * PIECES)
    prompts = wave(30, "a")
    s.run(prompts, 1024, max_tokens=3)
    assert LOG.count("replay") == PIECES
    assert all(report(s, name).bounded <= TIE for name in prompts)


def test_beside_a_drafter():
    """The target's graphs, the replay graphs, then the drafter's; drafts are verified and prompts are trimmed."""
    s = start(engine=DRAFTS, **DSPARK)
    streams = [stream for stream, _ in LOG.captures]
    model, ours, drafter = (streams.count(stream) for stream in dict.fromkeys(streams))
    assert (model, ours) == (len(s.rank.runner.cudagraph_manager.graphs), PIECES * len(SIZES))
    assert drafter > 0
    replays, prompts = LOG.count("replay"), {"a": tokens(300, 1), "b": tokens(20, 2)}
    steps = s.run(prompts, 200, max_tokens=4)
    assert any(0 <= step.kept < step.rows for step in steps)
    assert LOG.count("replay") > replays
    assert all(report(s, name).bounded <= TIE for name in prompts)


def test_piecewise_graphs_break_out_once():
    """Under `final` every size has one break for each layer before the cut, and one for all from the cut on."""
    s = start("FULL_AND_PIECEWISE", sizes=(16, 44), model_sizes=[4, 200])
    manager = s.rank.runner.cudagraph_manager
    breaks = {k.num_tokens: e.capture.num_eager_breaks for k, e in manager.breakable_cg_runner.entries.items()}
    assert breaks == dict.fromkeys((200, 4), CUT + 1)
    captured = LOG.count("begin")
    assert captured == len(manager.graphs) + 2 * (CUT + 2) + 2 * PIECES
    # A chunk without kept rows, a bucket inside a model graph, decodes in FULL graphs, a step too large for a graph.
    prompts = {"a": tokens(290, 1), "b": tokens(25, 2), "c": tokens(150, 3)}
    s.run(prompts, 200, max_tokens=3, arrivals={"b": 1, "c": 3})
    s.run({"d": tokens(260, 4)}, 1024, max_tokens=1)
    for name in (*prompts, "d"):
        r = report(s, name)
        assert (r.nan, r.zero, r.bounded <= TIE) == (False, True, True), (name, r)
    assert LOG.count("begin") == captured


@on_one_profile
def test_under_chunk_sizes_from_the_threshold_on_break_out(monkeypatch):
    # A flag of later vLLM versions.
    monkeypatch.setattr(CompilationConfig, "decoder_replay_trim_threshold", 33, raising=False)
    s = start("PIECEWISE", sizes=(16,), model_sizes=[32, 33], policy="chunk")
    entries = s.rank.runner.cudagraph_manager.breakable_cg_runner.entries
    breaks = {key.num_tokens: entry.capture.num_eager_breaks for key, entry in entries.items()}
    # At the threshold one break more than the layers before the cut have; below it every layer has its own.
    assert breaks == {33: CUT + 1, 32: LAYERS}


@on_one_profile
def test_piece_by_piece():
    """`ASCEND_REPLAY_DEBUG=1` gives the same, and names the break that fails and its layer."""
    s = start("NONE", sizes=(44,), debug=1)
    prompts = wave(30, "a")
    s.run(prompts, 1024, max_tokens=1)
    assert LOG.count("replay") == PIECES
    assert all(report(s, name).bounded <= TIE for name in prompts)

    def broken(*args):
        raise RuntimeError("aicore error")

    # Layer 6 breaks in the replay batch only: it is the first that runs there.
    s.rank.text.layers[6].self_attn.v41_impl._select_sparse_indices = broken
    with pytest.raises(GraphError) as error:
        s.run(wave(30, "broken"), 1024, max_tokens=1)
    words = "break 3 of 7 of the decoder replay graph of 44 rows failed, layer 6: RuntimeError: aicore error"
    assert words in str(error.value)


@on_one_profile
def test_replay_looks_nothing_up():
    """Negative control: pieces captured with the experts of other layers run those, whatever the context counts."""
    s = start("NONE", sizes=(44,), capture=False)
    tail = s.rank.state.replay_tail
    s.rank.text.place_aux_layers = lambda: setattr(tail, "moe_layers_before", 0)
    s.rank.capture()
    poison(s.rank)
    patches.MOE_CALLS.clear()
    prompts = wave(30, "a")
    s.run(prompts, 1024, max_tokens=1)
    assert [int(name.split("layers.")[1].split(".")[0]) for name, _ in patches.MOE_CALLS] == [0, 1, 2, 3] * 2
    assert report(s, next(iter(prompts))).bounded > TIE


def moved_weight(s):
    weight = s.rank.text.layers[5].hc_ffn_fn
    old, weight.data = weight.data, weight.data.clone()
    return "layers.5.hc_ffn_fn", lambda: setattr(weight, "data", old)


def moved_positions(s):
    buffers = s.rank.state.replay_buffers
    fill = buffers.fill

    def elsewhere(*args, **kwargs):
        kept = fill(*args, **kwargs)
        kept.positions = kept.positions.clone()
        return kept

    buffers.fill = elsewhere
    return "positions", lambda: setattr(buffers, "fill", fill)


@on_one_profile
def test_a_moved_tensor_turns_its_bucket_off(monkeypatch):
    errors = []
    monkeypatch.setattr(graphs_module.logger, "error", lambda words, *values: errors.append(words % values))
    sizes = (16, 24, 44)
    s = start("NONE", sizes=sizes)

    def is_off(size, name):
        """Two waves of a bucket's size run eagerly and right; one error names the tensor."""
        before = LOG.count("replay")
        for tag in "ab":
            prompts = wave(size, f"{tag} {size}")
            s.run(prompts, 1024, max_tokens=1)
            assert report(s, next(iter(prompts))).bounded <= TIE
        assert LOG.count("replay") == before
        assert len(errors) == 1
        words = f"graph of {size} rows is off from now on and its batches run eagerly: {name} is no longer where"
        assert words in errors.pop()

    for size in sizes:
        before = LOG.count("replay")
        s.run(wave(size, f"before {size}"), 1024, max_tokens=1)
        assert LOG.count("replay") == before + PIECES
    name, undo = moved_positions(s)
    is_off(sizes[0], name)
    undo()
    # All buckets read the weights: once one was found elsewhere, none is replayed.
    with torch.inference_mode():
        name, undo = moved_weight(s)
    is_off(sizes[1], name)
    with torch.inference_mode():
        undo()
    is_off(sizes[2], name)
    assert all(bucket.failed for bucket in graphs_of(s).buckets.values())


@on_one_profile
def test_a_read_back_in_a_piece_stops_start_up_and_names_it():
    s = start("NONE", sizes=(44,), capture=False)
    mlp = s.rank.text.layers[6].mlp
    forward = mlp.forward
    mlp.forward = lambda x, **kwargs: forward(x, **kwargs) * (1 if x.sum().item() else 2)
    with pytest.raises(GraphError, match="graph of 44 rows failed in piece 2, at layer 6") as error:
        s.rank.capture()
    assert "not permitted when stream is capturing" in str(error.value)
