"""Decoder replay on the real vllm-ascend engine: kept rows and decodes equal the bounded dense model."""

import numpy as np
import pytest
import torch

from tests.ascend.support import BLOCK, EXACT, LATE_LAYERS, WINDOW, first_kept, make_session
from tests.npu_emulator import ON_A5, patches
from tests.npu_emulator.checks import TIE, report
from tests.npu_emulator.session import Trace, tokens
from tests.npu_emulator.tiny import ONE_LATE_LAYER
from vllm_ascend_replay import stats


def check(session, *names):
    """Each request's kept rows and decodes equal the bounded oracle; dropped rows are zeros; nothing is NaN."""
    reports = {}
    for name in names or session.traces:
        r = reports[name] = report(session, name)
        assert not r.nan, (name, r)
        assert r.zero, (name, r)
        assert r.bounded <= TIE, (name, r)
    return reports


# ---- policies, chunks and lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["window", "exact"])
def test_odd_prompts_whatever_the_chunks(keep):
    """Lengths around the block and the window; results do not depend on how a prompt was chunked, bit for bit."""
    s = make_session(keep=keep, max_tokens=2048)
    rows = WINDOW if keep == "window" else EXACT
    for length, chunks in {
        129: (2048, 48),
        130: (128, 129),
        255: (2048, 100),
        257: (256, 48),
        450: (512, 100),
        706: (2048, 200),
    }.items():
        seen = []
        for chunk in chunks:
            s.reset()
            name = f"{length}/{chunk}"
            s.run({name: tokens(length, length)}, chunk, max_tokens=5)
            r, begin = check(s, name)[name], first_kept(length, rows)
            assert r.kept == (length - begin if begin else length)
            if keep == "exact" or not begin:
                assert (r.last, r.decodes) == (0, 0)
            t = s.traces[name]
            seen.append((torch.stack([t.row(p) for p in range(length - r.kept, length + 4)]), t.output))
        assert all(torch.equal(seen[0][0], x) and seen[0][1] == out for x, out in seen[1:])


# The oracle's time grows with the square of the length and is four times that on A5's wider heads.
@pytest.mark.parametrize(("policy", "chunk"), [("final", 2048), *([] if ON_A5 else [("chunk", 300)])])
def test_long_prompt(policy, chunk):
    s = make_session(policy=policy, max_tokens=2048, max_len=2048)
    s.run({"a": tokens(1930, 9)}, chunk, max_tokens=3)
    r = check(s)["a"]
    assert r.kept < 1930


@pytest.mark.parametrize("policy", ["final", "chunk"])
def test_window_of_128(policy):
    s = make_session(policy=policy, max_tokens=320, sliding_window=128)
    prompts = {"a": tokens(450, 1), "b": tokens(130, 2), "c": tokens(330, 3)}
    s.run(prompts, max_tokens=4, arrivals={"b": 1, "c": 1})
    reports = check(s)
    assert 128 <= reports["a"].kept < 450
    assert all(x.kept < x.rows for x in s.steps if x.kept >= 0)


SCHEDULES = {
    "one chunk": (512, {"a": 300, "b": 90}, {}),
    "chunks": (200, {"a": 700}, {}),
    "short last chunk": (320, {"a": 330}, {}),
    "mixed": (300, {"a": 260, "b": 500, "c": 40}, {"b": 2, "c": 3}),
}


def test_chunk_policy():
    s = make_session(policy="chunk", max_tokens=512)
    for name, (chunk, lens, arrivals) in SCHEDULES.items():
        s.reset()
        prompts = {f"{name}/{k}": tokens(n, i) for i, (k, n) in enumerate(lens.items())}
        s.run(prompts, chunk, max_tokens=5, arrivals={f"{name}/{k}": v for k, v in arrivals.items()})
        check(s, *prompts)
    assert any(0 < x.kept < x.rows for x in s.steps)


def test_mixed_batches_equal_requests_alone():
    """Decodes, requests without rows, short prompts and staggered arrivals share steps."""
    s = make_session()
    prompts = {"a": tokens(40, 1), "b": tokens(706, 2), "c": tokens(450, 3), "d": tokens(20, 4), "e": tokens(300, 5)}
    steps = s.run(prompts, 250, max_tokens=8, arrivals={"b": 1, "c": 3, "d": 4, "e": 5})
    assert any(0 < x.kept < x.rows and x.reqs > 1 for x in steps)
    check(s)
    for k, ids in prompts.items():
        s.reset()
        s.run({k + "'": ids}, 512, max_tokens=8)
        together, alone = s.traces[k], s.traces[k + "'"]
        assert alone.output == together.output
        assert torch.equal(alone.row(len(ids) - 1), together.row(len(ids) - 1))


def test_exact_is_lossless_and_tight():
    """F rows: the first token and 40 decodes equal the unbounded model. One row fewer: they do not.

    On A2/A3 the block alignment keeps up to a block more, so there the prompt must end F rows after a block boundary.
    """
    s = make_session(keep=EXACT)
    s.run({"a": tokens(BLOCK * 2 + EXACT, 7)}, 512, max_tokens=41)
    r = check(s)["a"]
    assert (r.kept, r.last, r.decodes) == (EXACT, 0, 0)
    s.rank.state.replay_keep_last = EXACT - 1
    s.reset()
    s.run({"b": tokens(BLOCK * 2 + EXACT - 1, 7)}, 512, max_tokens=2)
    r = check(s, "b")["b"]
    assert r.kept == EXACT - 1
    assert r.last > 0


def test_with_one_late_layer_nothing_is_approximate():
    s = make_session(**ONE_LATE_LAYER)
    s.run({"a": tokens(400, 5)}, 512, max_tokens=6)
    r = check(s)["a"]
    assert r.kept < 400
    assert (r.last, r.decodes) == (0, 0)


def test_last_chunk_of_one_row():
    s = make_session()
    s.run({"a": tokens(385, 1)}, 128, max_tokens=3)
    assert check(s)["a"].kept == (WINDOW if ON_A5 else 129)


def test_short_prompts_are_never_trimmed():
    s = make_session()
    s.run({"a": tokens(WINDOW if ON_A5 else BLOCK, 1), "b": tokens(9, 2)}, 512, max_tokens=3)
    assert all(x.kept == -1 for x in s.steps)
    assert all(r.last == 0 for r in check(s).values())


def test_prompt_logprobs_keep_every_row():
    """Such a request keeps its rows inside a batch that trims the others."""
    s = make_session(max_tokens=1024)
    plain, read = tokens(400, 1), tokens(300, 2)
    s.traces["b"] = Trace(list(read), len(read))
    s.rank.add("b", read, max_tokens=3, prompt_logprobs=1)
    s.run({"a": plain}, 1024, max_tokens=3)
    reports = check(s)
    assert (reports["b"].kept, reports["b"].last) == (300, 0)
    assert reports["a"].kept < 400
    assert s.steps[0].kept == 300 + reports["a"].kept


# ---- what runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_cut", [False, True])
def test_steps_without_kept_rows_skip_the_replay_layers(after_cut):
    s = make_session(after_cut=after_cut)
    patches.MOE_CALLS.clear()
    before = stats.snapshot()
    steps = s.run({"a": tokens(706, 1)}, 200, max_tokens=2)
    kept = 706 - first_kept(706, WINDOW)
    assert [x.kept for x in steps] == [0, 0, 0, kept, -1]
    rows = {}
    for name, n in patches.MOE_CALLS:
        rows.setdefault(int(name.split("layers.")[1].split(".")[0]), []).append(n)
    head = 5 if after_cut else 4
    assert all(rows[i] == [200, 200, 200, 106, 1] for i in range(head))
    assert all(rows[i] == [kept, 1] for i in range(head, 8))
    now = stats.snapshot()
    assert now["skipped_steps"] - before["skipped_steps"] == 3
    assert now["replay_steps"] - before["replay_steps"] == 1
    assert now["rows_kept"] - before["rows_kept"] == kept + 1


def test_layers_run_in_order_on_the_rows_they_should():
    s = make_session()
    patches.MOE_CALLS.clear()
    s.run({"a": tokens(300, 1)}, 512, max_tokens=1)
    kept = 300 - first_kept(300, WINDOW)
    assert [int(name.split("layers.")[1].split(".")[0]) for name, _ in patches.MOE_CALLS] == list(range(8))
    assert [n for _, n in patches.MOE_CALLS] == [300] * 4 + [kept] * 4


def test_from_the_cut_equals_after_the_cut():
    outcomes = []
    for after_cut in (False, True):
        s = make_session(after_cut=after_cut)
        s.run({"a": tokens(400, 5), "b": tokens(277, 6)}, 333, max_tokens=6)
        check(s)
        outcomes.append(s)
    for name in "ab":
        first, second = (s.traces[name] for s in outcomes)
        assert first.output == second.output
        for x, y in zip(first.rows, second.rows):
            assert torch.equal(x.hidden, y.hidden)


def test_aux_states_come_in_the_parents_order():
    """States entering layers before and after the cut; rows that were not kept are zero in the late ones."""
    s = make_session()
    text = s.rank.text
    text._set_aux_hidden_state_layers((4, 7, 8))
    s.rank.runner.use_aux_hidden_state_outputs = True
    s.rank.add("a", tokens(300, 1), max_tokens=2)
    _, state, _ = s.rank.step()
    kept = 300 - first_kept(300, WINDOW)
    assert [int((a.abs().amax(-1) > 0).sum()) for a in state.aux_hidden_states] == [300, kept, kept]
    whole = make_session(replay=False)
    whole.rank.text._set_aux_hidden_state_layers((4, 7, 8))
    whole.rank.runner.use_aux_hidden_state_outputs = True
    whole.rank.add("a", tokens(300, 1), max_tokens=2)
    _, full, _ = whole.rank.step()
    assert torch.equal(full.aux_hidden_states[0], state.aux_hidden_states[0])


def test_preemption_and_resume():
    """A resumed prompt counts what it generated; its window start moves up; every restart equals the oracle."""
    s = make_session()
    done = []

    def preempt(session):
        t = session.traces["a"]
        out = len(t.ids) - t.prompt
        for tag, now in (("prefill", len(t.rows) == 2), ("decode", out == 9), ("late", out == 30)):
            if now and tag not in done:
                done.append(tag)
                session.preempt("a")

    s.run({"a": tokens(500, 1), "b": tokens(70, 2)}, 200, max_tokens=33, each_step=preempt)
    assert done == ["prefill", "decode", "late"]
    check(s)
    starts = {int(r.floor.max()) for r in s.traces["a"].rows}
    assert len(starts) > 2


def test_persistent_clones_are_dropped_with_the_kv_cache():
    s = make_session()
    s.run({"a": tokens(300, 1)}, 512, max_tokens=1)
    state, first = s.rank.state, s.rank.state._tail_metadata
    s.run({"b": tokens(300, 2)}, 512, max_tokens=1)
    assert state._tail_metadata is first
    s.rank.runner.attn_groups = [list(groups) for groups in s.rank.runner.attn_groups]
    s.run({"c": tokens(300, 3)}, 512, max_tokens=1)
    assert state._tail_metadata is not first
    check(s, "a", "b", "c")


def test_device_lengths_are_used_for_decodes():
    """The host's lengths are upper bounds under speculation; what the operators get comes from the device."""
    s = make_session()
    seen = []
    build = s.rank.state.build_replay_batch

    def record(step, kept, dp_metadata):
        step.input_batch.seq_lens_np = step.input_batch.seq_lens_np + np.int32(3)
        made = build(step, kept, dp_metadata)
        step.input_batch.seq_lens_np = step.input_batch.seq_lens_np - np.int32(3)
        seen.append(made)
        return made

    s.rank.state.build_replay_batch = record
    s.run({"a": tokens(40, 1), "b": tokens(400, 2)}, 250, max_tokens=9, arrivals={"b": 2})
    assert seen
    check(s)


def test_constants_of_the_tiny_model():
    assert LATE_LAYERS == 3
    assert EXACT == 46


def test_the_cut_layer_writes_nothing_twice(monkeypatch):
    """Its pages are cacheable, and rows of a smaller batch may differ in their last bits: here they are NaN."""
    s = make_session()
    tail = s.rank.text.replay_tail
    impl = s.rank.text.layers[tail.cut].self_attn.v41_impl
    update, write_window, write_compressed = impl._update_caches, impl._write_swa_cache, impl._write_compressed_source
    all_rows, spoiled = [], set()

    def spoil(values, what):
        if all_rows or tail._ran is None:
            return values
        spoiled.add(what)
        return values * float("nan")

    def update_caches(*args):
        all_rows.append(True)
        update(*args)
        all_rows.pop()

    monkeypatch.setattr(impl, "_update_caches", update_caches)
    monkeypatch.setattr(impl, "_write_swa_cache", lambda attn, m, kv: write_window(attn, m, spoil(kv, "window")))
    monkeypatch.setattr(
        impl,
        "_write_compressed_source",
        lambda attn, hidden, *args, **kwargs: write_compressed(attn, spoil(hidden, "compressed"), *args, **kwargs),
    )
    s.run({"a": tokens(300, 1), "b": tokens(40, 2)}, 512, max_tokens=4)
    assert spoiled == {"window", "compressed"}
    check(s)
