"""Through vLLM's real engine: chunking, exactness, prompt log-probabilities, n > 1, processes, speculation."""

import pytest

from tests.engine.conftest import largest_difference, start, tokens

pytestmark = pytest.mark.engine

PROMPTS = [tokens(n) for n in (130, 61, 7, 45)]
GREEDY = dict(temperature=0.0, max_tokens=12, logprobs=-1)
LONG = dict(temperature=0.0, max_tokens=41, logprobs=-1)
WHOLE = dict(max_num_batched_tokens=512, max_logprobs=-1)
CHUNKS = dict(max_num_batched_tokens=37, max_logprobs=-1)
LOSSLESS_ROWS = 1 + 3 * 7  # three late layers, window 8


@pytest.fixture(scope="module")
def arms(model):
    """Answers of every setting, two engines at a time on two cores."""
    runs = [(PROMPTS, GREEDY), ([tokens(131)], LONG)]
    jobs = {
        "off": ({"ASCEND_REPLAY": "0"}, CHUNKS),
        "final": ({}, CHUNKS),
        "final whole": ({}, WHOLE),
        "exact": ({"ASCEND_REPLAY_KEEP": "exact"}, CHUNKS),
        "one row fewer": ({"ASCEND_REPLAY_KEEP": str(LOSSLESS_ROWS - 1)}, CHUNKS),
        "final async": ({}, {**CHUNKS, "async_scheduling": True}),
    }
    answers, names = {}, list(jobs)
    for pair in zip(names[::2], names[1::2]):
        started = {name: start(model, runs, jobs[name][0], stats=True, **jobs[name][1]) for name in pair}
        answers.update({name: process.answer() for name, process in started.items()})
    return answers


def test_rows_drop_and_intermediate_chunks_skip(arms):
    stats = arms["final"]["stats"][0]
    assert stats["rows_in"] > stats["rows_kept"]
    assert stats["skipped_steps"] >= 2
    assert stats["graph_steps"] == stats["padded_rows"] == 0
    whole = arms["final whole"]["stats"][0]
    assert (whole["replay_steps"], whole["skipped_steps"]) == (2, 0)
    assert arms["off"]["stats"][0]["steps"] == 0


def test_final_does_not_depend_on_chunking(arms):
    for chunked, whole in zip(arms["final"]["runs"], arms["final whole"]["runs"]):
        assert largest_difference(chunked, whole) < 1e-5


def test_async_scheduling_changes_nothing(arms):
    for a, b in zip(arms["final"]["runs"], arms["final async"]["runs"]):
        assert largest_difference(a, b) < 1e-5


def test_exact_equals_replay_off_and_one_row_fewer_does_not(arms):
    for exact, off in zip(arms["exact"]["runs"], arms["off"]["runs"]):
        assert largest_difference(exact, off) < 1e-5
    assert arms["exact"]["stats"][0]["rows_kept"] < arms["exact"]["stats"][0]["rows_in"]
    first = arms["one row fewer"]["runs"][1][0]["logprobs"][0][0]
    expected = arms["off"]["runs"][1][0]["logprobs"][0][0]
    assert max(abs(first[t] - expected[t]) for t in expected) > 1e-5


def test_window_mode_is_an_approximation(arms):
    """The control of the comparisons above: with the window alone the first token does differ."""
    first = arms["final"]["runs"][1][0]["logprobs"][0][0]
    expected = arms["off"]["runs"][1][0]["logprobs"][0][0]
    assert max(abs(first[t] - expected[t]) for t in expected) > 1e-4


def test_engine_core_and_worker_processes(model, arms):
    """The engine core in a process of its own; tensor parallelism with two worker processes."""
    processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    core = start(model, [(PROMPTS, GREEDY)], processes, stats=True, **CHUNKS)
    answer = core.answer()
    assert largest_difference(answer["runs"][0], arms["final"]["runs"][0]) < 1e-5
    two = start(
        model,
        [(PROMPTS, GREEDY)],
        {**processes, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        stats=True,
        tensor_parallel_size=2,
        **CHUNKS,
    )
    answer = two.answer()
    assert largest_difference(answer["runs"][0], arms["final"]["runs"][0]) < 1e-5
    assert len(answer["stats"]) == 2
    assert answer["stats"][0] == answer["stats"][1]
    assert answer["stats"][0]["skipped_steps"] >= 1


def test_several_samples_and_ngram_speculation(model, arms):
    # Without the prefix cache: the second sample's prompt would hit the first one's, which is another computation.
    sampling = dict(temperature=1.0, seed=3, n=3, max_tokens=5, logprobs=-1)
    several = start(model, [([PROMPTS[0]], sampling)], enable_prefix_caching=False, **CHUNKS)
    # A repetitive prompt, so that drafts are proposed and accepted or refused.
    prompt = (tokens(9) * 12)[:101]
    drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
    runs = [([prompt, PROMPTS[1]], dict(temperature=0.0, max_tokens=24, logprobs=-1))]
    speculating = start(model, runs, stats=True, speculative_config=drafts, **CHUNKS)
    # Three samples of one prompt: each is one of the model's own continuations, and all begin with row P - 1.
    samples = several.answer()["runs"][0][0]
    assert len(samples["tokens"]) == 3
    expected = arms["final"]["runs"][0][0]["logprobs"][0][0]
    for logprobs in samples["logprobs"]:
        assert max(abs(logprobs[0][t] - expected[t]) for t in expected) < 1e-5
    plain = start(model, runs, stats=True, **CHUNKS)
    with_drafts = speculating.answer()
    assert largest_difference(with_drafts["runs"][0], plain.answer()["runs"][0]) < 1e-5
    assert with_drafts["metrics"]["vllm:spec_decode_num_draft_tokens"] > 0
    assert with_drafts["stats"][0]["replay_steps"] > 0


def test_preempted_requests_resume_with_drafts_in_the_last_chunk(model):
    """A KV cache too small for all: requests are preempted and prefill again, generated tokens included."""
    prompts = [(tokens(5, seed) * 12)[:31] for seed in range(6)]
    runs = [(prompts, dict(temperature=0.0, max_tokens=45, logprobs=-1))]
    drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
    common = dict(num_gpu_blocks_override=40, max_model_len=96, enable_prefix_caching=False, **CHUNKS)
    exact = {"ASCEND_REPLAY_KEEP": "exact"}
    small = start(model, runs, exact, stats=True, speculative_config=drafts, **common)
    roomy = start(model, runs, {"ASCEND_REPLAY": "0"}, max_model_len=96, enable_prefix_caching=False, **CHUNKS)
    answer = small.answer()
    assert answer["metrics"]["vllm:num_preemptions"] > 0
    assert answer["stats"][0]["rows_kept"] < answer["stats"][0]["rows_in"]
    assert largest_difference(answer["runs"][0], roomy.answer()["runs"][0]) < 1e-5
