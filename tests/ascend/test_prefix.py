"""Prefix caching on vLLM 0.30, on by default: hits are capped where late layers have no window KV."""

from types import SimpleNamespace

import pytest
import torch

from tests.ascend.support import BLOCK, EXACT, WINDOW, first_kept, make_session
from tests.npu_emulator import ON_A5
from tests.npu_emulator.checks import TIE, report
from tests.npu_emulator.session import tokens
from vllm_ascend_replay.ascend.prefix_cap import Holes, hit_limit
from vllm_ascend_replay.layer_plan import read_layer_plan


def start(*, capped=True, **kwargs):
    s = make_session(engine={"enable_prefix_caching": True}, **kwargs)
    if not capped:
        uncap(s)
    return s


def uncap(session):
    """Takes the cap off this scheduler, and the worker's guard, for the controls."""
    manager = session.rank.scheduler.kv_cache_manager
    for owner, name in (
        (manager, "get_computed_blocks"),
        (manager, "free"),
        (manager.coordinator, "get_replay_boundaries"),
    ):
        delattr(owner, name)
    manager.block_pool.cache_full_blocks = type(manager.block_pool).cache_full_blocks.__get__(manager.block_pool)
    session.rank.state._check_start = lambda new_request: None


def good(session, name, keep="window"):
    r = report(session, name)
    assert not r.nan, (name, r)
    assert r.zero, (name, r)
    assert r.bounded <= TIE, (name, r)
    if keep == "exact":
        assert r.last <= TIE, (name, r)
        assert r.decodes <= TIE, (name, r)
    return r


def same_as_cold(session, name):
    """Kept rows and decodes equal a cold run of the same prompt, bit for bit."""
    warm = session.traces[name]
    good(session, name)
    session.reset()
    session.run({name + "!": warm.ids[: warm.prompt]}, 512, max_tokens=len(warm.output))
    cold, r = session.traces[name + "!"], good(session, name + "!")
    assert cold.hits == [0]
    assert warm.output == cold.output
    for p in range(warm.prompt - r.kept, warm.prompt + len(warm.output) - 1):
        assert warm.row(p) is None or torch.equal(warm.row(p), cold.row(p)), (name, p)


# ---- scenarios ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["window", "exact"])
def test_shared_prefixes_and_resends(keep):
    s, rows = start(keep=keep), WINDOW if keep == "window" else EXACT
    a = tokens(706, 1)
    s.run({"a": a}, 200, max_tokens=2)
    cases = {
        "b": a[:600] + tokens(200, 2),
        "c": a[:450],
        "d": a,
        "e": a[:256] + tokens(20, 3),
        "f": a[:130],
        "g": a[:700] + tokens(30, 4),
    }
    for name, ids in cases.items():
        s.run({name: ids}, 200, max_tokens=5)
        good(s, name, keep)
        assert s.traces[name].hits[0] <= max(len(ids) - rows, 0)
    assert s.traces["b"].hits == [512]
    assert s.traces["d"].hits == [640]
    assert s.traces["f"].hits == [0]
    for name in ("b", "d", "e"):
        same_as_cold(s, name)


def test_conversation_of_four_turns():
    s = start(keep="exact")
    ids, hits = tokens(450, 1), []
    for turn in range(4):
        name = f"t{turn}"
        s.run({name: ids}, 200, max_tokens=12)
        hits.append(s.traces[name].hits[0])
        good(s, name, "exact")
        ids = s.traces[name].ids + tokens(60 + turn, 10 + turn)
    assert hits[0] == 0
    assert all(h > 0 for h in hits[1:])


def test_twins_in_one_step():
    """Blocks are hashed when they are scheduled, so a twin can hit pages that the same forward writes."""
    s = start(keep="exact")
    a = tokens(450, 1)
    s.run({"a": a, "b": a}, 1000, max_tokens=3)
    for name in "ab":
        good(s, name, "exact")


def test_hits_in_a_mixed_batch():
    s = start(keep="exact")
    a = tokens(706, 1)
    s.run({"a": a}, 200, max_tokens=2)
    prompts = {"b": a[:600] + tokens(200, 2), "c": tokens(300, 3), "d": a[:512] + tokens(7, 5), "e": tokens(33, 8)}
    s.run(prompts, 150, max_tokens=5, arrivals={"c": 1, "d": 2})
    for name in prompts:
        good(s, name, "exact")
    assert s.traces["b"].hits[0] > 0


def test_eviction_and_recycled_pages():
    s = start(keep="exact", blocks=48, max_len=1024, max_tokens=200)
    base, total = tokens(706, 1), 0
    for i in range(7):
        name, ids = f"r{i}", base[:640] + tokens(50 + i, i + 2) if i % 3 else tokens(300 + 40 * i, 100 + i)
        s.run({name: ids}, 200, max_tokens=3)
        total += s.traces[name].hits[0]
        good(s, name, "exact")
    assert total > 0


@pytest.mark.parametrize("forget", [False, True])
def test_preemption_and_resume(forget):
    """A resumed prompt counts what it generated; its own cached pages have holes below its new window start."""
    s = start()
    done = []

    def preempt(session):
        t = session.traces["a"]
        out = len(t.ids) - t.prompt
        for tag, now in (("prefill", len(t.rows) == 2), ("decode", out == 9), ("late", out == 30)):
            if now and tag not in done:
                done.append(tag)
                session.preempt("a")
                if forget:
                    assert session.rank.scheduler.reset_prefix_cache()

    s.run({"a": tokens(500, 1)}, 200, max_tokens=33, each_step=preempt)
    assert done == ["prefill", "decode", "late"]
    good(s, "a")
    assert (max(s.traces["a"].hits) > 0) != forget


def test_sparse_retention_keeps_the_blocks_a_resend_resumes_at():
    """With sparse retention only some window blocks stay cached: those below a prompt's first kept position must."""
    s = start(keep="exact")
    coordinator = s.rank.scheduler.kv_cache_manager.coordinator
    assert coordinator.retention_interval is None
    coordinator.retention_interval = 0
    a = tokens(402, 1)
    for name in ("a", "a2"):
        s.run({name: a}, 200, max_tokens=2)
        good(s, name, "exact")
    assert s.traces["a2"].hits == [256]


# ---- prompts that are not bounded ----------------------------------------------------------------------------------


def test_short_prompts_keep_their_hits_on_whole_pages():
    """Neither prompt is bounded, so the second may use everything the first cached."""
    s = start(min_saved=600)
    a = tokens(450, 1)
    s.run({"a": a}, 200, max_tokens=2)
    s.run({"b": a[:400] + tokens(20, 2)}, 200, max_tokens=3)
    assert s.traces["b"].hits == [384]
    r = good(s, "b")
    assert (r.last, r.decodes) == (0, 0)


def test_short_prompts_get_no_hit_on_pages_with_holes():
    s = start(min_saved=400)
    a = tokens(706, 1)
    s.run({"a": a}, 200, max_tokens=2)
    s.run({"b": a[:300]}, 200, max_tokens=2)
    s.run({"c": a[:450]}, 200, max_tokens=2, prompt_logprobs=1, skip_reading_prefix_cache=False)
    for name in "bc":
        assert s.traces[name].hits == [0]
        assert good(s, name).last == 0


def test_a_page_computed_again_in_full_is_whole_again():
    """A short prompt that finds only holes computes and caches its own pages; the next one hits those."""
    s = start(min_saved=400)
    a = tokens(706, 1)
    s.run({"a": a}, 200, max_tokens=2)
    assert s.rank.scheduler.reset_prefix_cache()
    s.run({"b": a[:300]}, 200, max_tokens=2)
    s.run({"c": a[:300]}, 200, max_tokens=2)
    assert (s.traces["b"].hits, s.traces["c"].hits) == ([0], [256])
    assert good(s, "c").last == 0


def test_holes_are_judged_by_window_start_and_spread():
    plan = read_layer_plan(
        SimpleNamespace(
            num_hidden_layers=8,
            sliding_window=16,
            compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1],
            kv_source_layer_ids=[2, 4],
            index_source_layer_ids=[2, 4, 6],
        )
    )
    holes = Holes(plan)
    # Begin 256: the last late layer's streams are exact again two windows later, at 286.
    for block_id, first in ((1, 0), (2, 128), (3, 256), (4, 384)):
        holes.judge(block_id, first, 256)
    assert holes.blocks == {1, 2, 3}
    holes.judge(2, 128, 0)
    assert holes.blocks == {1, 3}


def test_hit_limit():
    values = {"keeps_rows": False, "keep_last": 128, "min_saved": 1, "align": 128}
    assert [hit_limit(n, **values) for n in (100, 255, 256, 706)] == [0, 0, 128, 512]
    assert hit_limit(706, **{**values, "align": 1}) == 578
    assert hit_limit(706, **{**values, "keeps_rows": True}) == 0
    assert hit_limit(706, **{**values, "min_saved": 600}) == 0


# ---- controls -------------------------------------------------------------------------------------------------------


def test_control_without_the_cap():
    s = start(capped=False)
    a = tokens(706, 1)
    s.run({"a": a}, 200, max_tokens=2)
    for name, ids in {"b": a[:512] + tokens(2, 2), "c": a[:650], "d": a[:256] + tokens(20, 3)}.items():
        s.run({name: ids}, 200, max_tokens=2)
        beyond = s.traces[name].hits[0] > first_kept(len(ids), WINDOW)
        assert report(s, name).nan == beyond
    assert s.traces["b"].hits[0] > first_kept(514, WINDOW)


def test_the_worker_notices_a_missing_cap():
    s = start(capped=False)
    del s.rank.state._check_start
    a = tokens(706, 1)
    s.run({"a": a}, 200, max_tokens=2)
    with pytest.raises(RuntimeError, match="at most 498 of its" if ON_A5 else "at most 384 of its"):
        s.run({"b": a[:512] + tokens(2, 2)}, 200, max_tokens=2)


def test_control_a_prompt_that_is_not_bounded_hits_a_hole():
    s = start(capped=False, min_saved=600)
    a = tokens(706, 1)
    s.run({"a": a}, 200, max_tokens=2)
    s.run({"b": a[:300]}, 200, max_tokens=2)
    assert s.traces["b"].hits[0] > 0
    assert report(s, "b").nan


def test_control_nothing_to_trim_is_not_nothing_to_bound():
    """After a hit at its window start a prompt keeps every row, yet without the bound it reads holes."""
    s = start()
    a = tokens(5 * BLOCK + WINDOW, 1)
    s.run({"a": a}, 200, max_tokens=2)
    s.run({"b": a}, 200, max_tokens=2)
    assert s.traces["b"].hits == [5 * BLOCK]
    assert s.steps[-2].kept == s.steps[-2].rows
    good(s, "b")
    s.rank.state.replay_tail = None
    s.run({"c": a}, 200, max_tokens=2)
    assert s.traces["c"].hits == [5 * BLOCK]
    assert report(s, "c").nan


def test_control_shortening_a_hit_afterwards_is_wrong():
    """A window group's hit holds only the blocks before its end; its head is not a shorter hit."""
    s = start(capped=False)
    a = tokens(706, 1)
    s.run({"a": a}, 200, max_tokens=2)
    manager = s.rank.scheduler.kv_cache_manager
    real = manager.get_computed_blocks

    def late_cut(request):
        blocks, n, junction = real(request)
        n = min(n, 384)
        return manager.truncate_computed_blocks(blocks, n), n, junction

    manager.get_computed_blocks = late_cut
    s.run({"b": a[:700] + tokens(30, 4)}, 200, max_tokens=2)
    assert report(s, "b").nan
