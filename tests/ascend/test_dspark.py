"""DSpark beside decoder replay: vllm-ascend's own drafter reads the prompt's last W rows, all of them kept.

The target verifies every draft, so a wrong draft costs speed and never a token: the tests compare what is drafted.
"""

import math
from dataclasses import replace

import pytest
import torch

from tests.ascend.support import BLOCK, WINDOW, make_session
from tests.ascend.test_replay import check
from tests.npu_emulator import ON_A5, caches
from tests.npu_emulator.session import poison, tokens
from tests.npu_emulator.tiny import DRAFTS, DSPARK, make_vllm_config, say_few_words
from vllm_ascend_replay import stats
from vllm_ascend_replay.ascend import off_reason
from vllm_ascend_replay.ascend.prefix_cap import late_window_groups
from vllm_ascend_replay.layer_plan import read_layer_plan

# The first prompt ends in a chunk of 5 rows, less than a window. Both are bounded, also in `exact`, which keeps more.
CHUNK, LENGTHS = (48, (101, 90)) if ON_A5 else (95, (290, 280))
PROMPTS = {name: tokens(n, n) for name, n in zip("ab", LENGTHS)}
OUTPUT = 6


def start(*, drafts=True, engine=None, **config):
    """A session whose model and drafter say few different words, so that some drafts stand."""
    s = make_session(engine={**(DRAFTS if drafts else {}), **(engine or {})}, **DSPARK, **config)
    say_few_words(s.rank.model, *([s.rank.drafter.model] if drafts else []))
    return s


def serve(s, *, preempt=False):
    """Two prompts in chunks, the second beside decodes; `preempt`: the first is preempted while it decodes."""

    def each_step(session):
        if waiting and len(session.traces["a"].output) >= 3:
            session.preempt(waiting.pop())

    waiting = ["a"] if preempt else []
    s.run(PROMPTS, CHUNK, max_tokens=OUTPUT, arrivals={"b": len(PROMPTS["a"]) // CHUNK + 1}, each_step=each_step)
    assert len(s.traces["a"].hits) == 1 + preempt
    return s


def output(s):
    return {name: s.traces[name].output for name in PROMPTS}


def drafts(*traces):
    """Every proposed token [n] and what the drafter's head read [n, H], step by step; nothing is NaN."""
    found = [d for t in traces for d in t.drafts]
    assert found
    assert not any(bool(d.hidden.isnan().any()) for d in found)
    return found


def equal(some, others):
    return len(some) == len(others) and all(
        torch.equal(x.hidden, y.hidden) and torch.equal(x.tokens, y.tokens) for x, y in zip(some, others)
    )


class Spoiler:
    """Overwrites the late aux states of rows that were not kept, which are zeros, with `value` times random numbers."""

    def __init__(self, s, value):
        self.finish, self.value, self.rows = s.rank.text.replay_tail.finish, value, 0
        s.rank.text.replay_tail.finish = self

    def __call__(self, hidden, early_aux, num_tokens):
        hidden, aux = self.finish(hidden, early_aux, num_tokens)
        for state in aux[len(early_aux) :]:
            dropped = (state == 0).all(-1)
            noise = torch.randn(state.shape, generator=torch.Generator().manual_seed(self.rows)) * self.value
            state[dropped] = noise.to(state.dtype)[dropped]
            self.rows += int(dropped.sum())
        return hidden, aux


def served(*, preempt, **config):
    """Tokens and drafts of `serve`; dropped rows are NaN to the drafter."""
    s = start(**config)
    spoiler = Spoiler(s, math.nan) if config.get("replay", True) else None
    serve(s, preempt=preempt)
    if spoiler is not None:
        assert spoiler.rows
        assert any(0 < step.kept < step.rows and step.reqs > 1 for step in s.steps)
    found = drafts(*s.traces.values())
    # Some drafts stood: fewer steps than tokens.
    assert len(found) < len(PROMPTS) * OUTPUT
    return output(s), found


# ---- tokens and drafts ----------------------------------------------------------------------------------------------


def test_tokens_are_those_without_a_drafter():
    plain = start(drafts=False)
    plain.run(PROMPTS, max_tokens=OUTPUT)
    assert served(preempt=False)[0] == output(plain)


def test_exact_drafts_what_is_drafted_without_the_package():
    """Every token of every draft, and the very rows it is read from, also of a preempted request that resumes."""
    want, got = served(replay=False, preempt=True), served(keep="exact", preempt=True)
    assert got[0] == want[0]
    assert equal(got[1], want[1])


@pytest.mark.parametrize("policy", ["final", "chunk"])
def test_dropped_rows_are_never_read(policy):
    """Whatever the drafter finds in the trimmed rows, it drafts the same from the same states.

    The last chunk is shorter than the window: under `chunk` the window's other rows were kept by the chunk before.
    """
    s = start(policy=policy)
    spoiler = Spoiler(s, math.nan)
    s.run({"nan": PROMPTS["a"]}, CHUNK, max_tokens=1)
    spoiler.value = 3.0
    s.run({"noise": PROMPTS["a"]}, CHUNK, max_tokens=1)
    assert spoiler.rows
    assert equal(drafts(s.traces["nan"]), drafts(s.traces["noise"]))
    check(s, "nan")


@pytest.mark.skipif(ON_A5, reason="the same code on both profiles")
def test_graphs_draft_what_eager_layers_draft():
    """Replay layers out of graphs, in whose memory the drafter's graphs work too; the aux states are the same."""
    compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [5]}
    s = start(engine={"enforce_eager": False, "compilation_config": compilation}, graph_sizes="64")
    s.rank.capture()
    poison(s.rank)
    graphs, seen = s.rank.state.replay_graphs, []
    for name, own in (("graph", graphs), ("eager", None)):
        s.rank.state.replay_graphs = own
        before = stats.snapshot()["graph_steps"]
        s.rank.add(name, PROMPTS["a"], max_tokens=4)
        _, state, _ = s.rank.step()
        assert stats.snapshot()["graph_steps"] - before == (own is not None)
        drafted = [s.rank.drafter.draft_tokens[0].tolist()]
        while s.rank.scheduler.has_unfinished_requests():
            s.rank.step()
            drafted.append(s.rank.drafter.draft_tokens[0].tolist())
        seen.append((torch.stack(state.aux_hidden_states), drafted))
    assert torch.equal(seen[0][0], seen[1][0])
    assert seen[0][1] == seen[1][1]


# ---- prefix hits ----------------------------------------------------------------------------------------------------


def test_hits_draft_what_a_cold_run_drafts():
    s = start(engine={"enable_prefix_caching": True}, min_saved=BLOCK * 2 - 6)
    long, short = tokens(BLOCK * 2 + 80, 3), tokens(BLOCK * 2 + 4, 4)
    for cold, again, prompt in (("a", "b", long), ("c", "d", short)):
        for name in (cold, again):
            s.run({name: prompt}, 200, max_tokens=3)
        cold, again = s.traces[cold], s.traces[again]
        assert (cold.hits, again.hits) == ([0], [BLOCK * 2])
        assert again.output == cold.output
        assert equal(drafts(again), drafts(cold))
    # A prompt that is not bounded reads cached rows below its hit, and so does its drafter: no page with holes.
    s.run({"e": long[: len(short)]}, max_tokens=1)
    assert s.traces["e"].hits == [0]
    groups, _ = late_window_groups(s.rank.kv_config, read_layer_plan(s.rank.text.config))
    late = {name for g in groups for name in s.rank.kv_config.kv_cache_groups[g].layer_names}
    assert late >= set(s.rank.drafter.model.get_draft_kv_cache_layer_names())


# ---- gate and controls ----------------------------------------------------------------------------------------------


def test_gate():
    config = make_vllm_config(engine=DRAFTS, **DSPARK)
    assert off_reason(config) is None
    draft = config.speculative_config.draft_model_config
    draft.hf_text_config.sliding_window = WINDOW + 1
    assert off_reason(config).endswith("its window is 17 tokens, the model's 16")
    draft.hf_text_config.sliding_window = WINDOW
    assert off_reason(config) is None
    draft.model_arch_config = replace(draft.model_arch_config, architectures=["Qwen3DSparkModel"])
    assert "'dspark' is not one that this host runs" in off_reason(config)


# On A2 a bounded window begins at a multiple of the block: of this prompt, not one row more than a window is kept.
TIGHT = tokens(BLOCK + WINDOW, 5)


def test_a_window_of_one_more_row_is_noticed(monkeypatch):
    s = start()
    Spoiler(s, math.nan)
    for wider in (0, 1):

        def windows(block_table, num_drafts, window, *args, wider=wider, **kwargs):
            return caches.draft_window_indices(block_table, num_drafts, window + wider, *args, **kwargs)

        monkeypatch.setattr("vllm_ascend.attention.dsa_v41.build_dspark_swa_indices", windows)
        s.run({f"{wider}": TIGHT}, max_tokens=1)
        assert s.steps[-1].kept == WINDOW
        assert bool(s.traces[f"{wider}"].drafts[0].hidden.isnan().any()) == bool(wider)


def test_rows_scattered_to_their_neighbours_are_noticed():
    s = start()
    s.run({"right": TIGHT}, max_tokens=1)
    finish = s.rank.text.replay_tail.finish

    def shifted(*args):
        hidden, aux = finish(*args)
        return hidden, [state.roll(1, 0) for state in aux]

    s.rank.text.replay_tail.finish = shifted
    s.run({"wrong": TIGHT}, max_tokens=1)
    right, wrong = s.traces["right"], s.traces["wrong"]
    assert wrong.output == right.output
    assert not equal(drafts(wrong), drafts(right))
