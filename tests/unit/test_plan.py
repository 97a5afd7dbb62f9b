"""The plan against a brute-force oracle that looks at one position at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_replay.plan import (
    bounded_prefills,
    empty_plan,
    exact_rows,
    first_kept,
    identity_plan,
    lowers_into_unwritten,
    plan_replay,
)

ODD_LENGTHS = [1, 4, 127, 128, 129, 130, 255, 257, 450, 706, 1930]


@st.composite
def steps(draw):
    """One step: prefilling requests anywhere in their prompts, decodes, drafts, hits, keeps-every-row requests."""
    window = draw(st.sampled_from([1, 8, 128]))
    n = draw(st.integers(1, 8))
    rows = []
    for _ in range(n):
        prefill = draw(st.one_of(st.sampled_from(ODD_LENGTHS), st.integers(1, 3000)))
        prefilling = draw(st.booleans())
        if prefilling:
            start = draw(st.sampled_from([0, 0, prefill // 3]))
            computed = draw(st.integers(start, prefill - 1))
            query = draw(st.integers(1, prefill - computed))
            if computed + query == prefill:
                query += draw(st.integers(0, 5))  # drafts behind the prompt
        else:
            start, computed, query = 0, prefill + draw(st.integers(0, 9)), draw(st.integers(1, 6))
        rows.append((computed, query, prefill, prefilling, draw(st.integers(0, 4)) == 0, start))
    names = ["num_computed", "query_lens", "prefill_lens", "is_prefilling", "keeps_rows", "replay_start"]
    step = {name: np.array(values) for name, values in zip(names, zip(*rows))}
    step.update(
        window=window,
        policy=draw(st.sampled_from(["final", "chunk"])),
        align=draw(st.sampled_from([1, 3, 16, 128])),
        min_saved=draw(st.sampled_from([1, 7, 500])),
    )
    step["keep_last"] = draw(st.sampled_from([None, window, window + 3, exact_rows(3, window)]))
    if step["policy"] == "chunk":
        step["keep_last"], step["min_saved"] = None, 1
    return step


def brute_force(step):
    """(kept positions, kv_start) of every request, position by position from the policy's words."""
    out, needs = [], False
    keep = step["keep_last"] or step["window"]
    for i in range(len(step["query_lens"])):
        c, q, p = (int(step[k][i]) for k in ("num_computed", "query_lens", "prefill_lens"))
        rs, positions = int(step["replay_start"][i]), range(c, c + q)
        kept, kv_start = list(positions), rs
        if step["is_prefilling"][i] and not step["keeps_rows"][i]:
            if step["policy"] == "final":
                begin = max(p - keep, 0)
                begin -= begin % step["align"]
                if begin - rs >= max(step["min_saved"], 1):
                    needs = True
                    kept = [x for x in positions if x >= begin]
                    kv_start = max(begin, rs)
            elif q > step["window"]:
                begin = max(min(c + q, p) - step["window"], 0)
                begin -= begin % step["align"]
                trimmed = [x for x in positions if x >= begin]
                if len(trimmed) < q:
                    needs = True
                    kept, kv_start = trimmed, max(begin, rs)
        out.append((kept, kv_start))
    return out, needs


@given(steps())
def test_plan_equals_brute_force(step):
    plan = plan_replay(**step)
    expected, needs = brute_force(step)
    ends = step["num_computed"] + step["query_lens"]
    for i, (kept, kv_start) in enumerate(expected):
        assert list(range(ends[i] - plan.kept_lens[i], ends[i])) == kept
        assert plan.kv_start[i] == kv_start
    assert plan.needs_replay == needs
    assert plan.num_rows == sum(len(kept) for kept, _ in expected)
    dropped = np.concatenate([[0], np.cumsum(step["query_lens"] - plan.kept_lens)])
    assert plan.dropped_before.tolist() == dropped.tolist()
    for array in (plan.kept_lens, plan.kv_start, plan.dropped_before):
        assert array.dtype == np.int32
    assert plan.requests.tolist() == [i for i, (kept, _) in enumerate(expected) if kept]


@given(steps())
def test_no_kept_row_reads_below_kv_start_what_was_written(step):
    """Under ``final`` every position from kv_start on is kept in some chunk, so the window never has a hole."""
    if step["policy"] != "final":
        return
    plan = plan_replay(**step)
    for i, kv_start in enumerate(plan.kv_start):
        if not step["is_prefilling"][i]:
            continue
        p, rs = int(step["prefill_lens"][i]), int(step["replay_start"][i])
        # The whole rest of the prompt as chunks of one row each: from kv_start on all of them are kept.
        for position in {int(kv_start), p - 1, (int(kv_start) + p) // 2}:
            if position < max(kv_start, rs) or position >= p:
                continue
            one = {**step, "num_computed": np.array([position]), "query_lens": np.array([1])}
            for name in ("prefill_lens", "is_prefilling", "keeps_rows", "replay_start"):
                one[name] = step[name][i : i + 1]
            assert plan_replay(**one).kept_lens.tolist() == [1]


@given(st.integers(1, 4000), st.lists(st.integers(1, 700), min_size=1, max_size=30), st.sampled_from([8, 128]))
def test_final_keeps_the_same_positions_for_any_chunking(length, chunks, window):
    kept, starts, computed = [], set(), 0
    for q in [*chunks, length]:
        q = min(q, length - computed)
        if q == 0:
            break
        plan = plan_replay(
            num_computed=[computed],
            query_lens=[q],
            prefill_lens=[length],
            is_prefilling=[True],
            keeps_rows=[False],
            replay_start=[0],
            window=window,
        )
        computed += q
        kept += range(computed - plan.kept_lens[0], computed)
        starts.add(int(plan.kv_start[0]))
    assert kept == list(range(max(length - window, 0), length))
    assert starts == {max(length - window, 0)}


def test_a_prompt_of_at_most_a_window_is_never_trimmed():
    for length in (1, 127, 128):
        plan = plan_replay(
            num_computed=[0],
            query_lens=[length],
            prefill_lens=[length],
            is_prefilling=[True],
            keeps_rows=[False],
            replay_start=[0],
            window=128,
        )
        assert (plan.needs_replay, plan.num_rows) == (False, length)


def test_a_hit_that_leaves_nothing_to_trim_is_not_bounded():
    common = dict(prefill_lens=[300], keeps_rows=[False], keep_last=128)
    assert bounded_prefills(replay_start=[171], **common).tolist() == [True]
    assert bounded_prefills(replay_start=[172], **common).tolist() == [False]


def test_v41_rows_of_the_lossless_mode():
    assert exact_rows(19, 128) == 2414


def test_alignment_keeps_more_rows_never_fewer():
    assert first_kept([300, 129, 1], 128, 64).tolist() == [128, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "last"}, "policy is 'last'; allowed are final, chunk"),
        ({"keep_last": 127}, "keep_last is 127; it must be at least the window, 128"),
        ({"window": 0}, "must be positive"),
        ({"align": 0}, "must be positive"),
    ],
)
def test_bad_arguments(changes, message):
    step = dict(
        num_computed=[0],
        query_lens=[4],
        prefill_lens=[4],
        is_prefilling=[True],
        keeps_rows=[False],
        replay_start=[0],
        window=128,
    )
    with pytest.raises(ValueError, match=message):
        plan_replay(**{**step, **changes})


def test_identity_and_empty_plans():
    every, none = identity_plan([3, 1, 5], [0, 2, 0]), empty_plan([3, 1, 5])
    assert (every.num_rows, every.needs_replay, every.kept_lens.tolist()) == (9, False, [3, 1, 5])
    assert every.dropped_before.tolist() == [0, 0, 0, 0]
    assert (none.num_rows, none.requests.tolist(), none.dropped_before.tolist()) == (0, [], [0, 3, 4, 9])


def test_only_the_prompts_tail_may_run_in_a_decode_graph():
    assert lowers_into_unwritten(num_computed=[5, 298], prefill_lens=[5, 300], bounded=[False, True])
    assert not lowers_into_unwritten(num_computed=[5, 299], prefill_lens=[5, 300], bounded=[False, True])
    assert not lowers_into_unwritten(num_computed=[5], prefill_lens=[300], bounded=[False])


def test_drafts_behind_the_prompt_cost_no_prompt_row():
    """They may all be rejected, and the next row's window reaches W - 1 rows into the prompt."""
    step = dict(
        num_computed=[0],
        query_lens=[33],
        prefill_lens=[30],
        is_prefilling=[True],
        keeps_rows=[False],
        replay_start=[0],
        window=8,
    )
    for policy in ("final", "chunk"):
        plan = plan_replay(**step, policy=policy)
        assert (plan.kept_lens.tolist(), plan.kv_start.tolist()) == ([8 + 3], [22])
