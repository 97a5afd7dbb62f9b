"""vLLM's engine with two tensor-parallel workers that share the rows, against one worker that has them all."""

import functools

import pytest

from tests.engine.conftest import largest_difference, start, tokens
from vllm_ascend_replay.reference.config import write_model

pytestmark = pytest.mark.engine

PROMPTS = [tokens(n) for n in (131, 61, 7, 45)]
RUNS = [
    (PROMPTS, dict(temperature=0.0, max_tokens=9, logprobs=-1)),
    # Every row of this prompt is read, while another one is trimmed.
    ([tokens(75), tokens(101)], dict(temperature=0.0, max_tokens=5, logprobs=-1, prompt_logprobs=2)),
]
ENGINE = dict(max_num_batched_tokens=37, max_logprobs=-1)
TWO = dict(tensor_parallel_size=2, **ENGINE)
PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
LAYOUTS = {"sp": dict(sequence_parallel=True), "dsa-cp": dict(sequence_parallel=True, dsa_context_parallel=True)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Model directories by layout; float32."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_model(folder / name, "tiny", compute_dtype="float32", **flags)
        for name, flags in {"whole": {}, **LAYOUTS}.items()
    }


@pytest.fixture(scope="module")
def alone(directory):
    """Answers of one worker under each policy, each computed once."""
    return functools.cache(
        lambda policy: start(directory["whole"], RUNS, {"ASCEND_REPLAY_POLICY": policy}, stats=True, **ENGINE).answer()
    )


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("sp", "final"),
        ("dsa-cp", "final"),
        # How rows are exchanged does not depend on which ones are kept.
        pytest.param("sp", "chunk", marks=pytest.mark.slow),
        pytest.param("dsa-cp", "chunk", marks=pytest.mark.slow),
    ],
)
def test_sharded_equals_whole(alone, directory, layout, policy):
    settings = {"ASCEND_REPLAY_POLICY": policy, **PROCESSES}
    sharded = start(directory[layout], RUNS, settings, stats=True, **TWO).answer()
    for some, all_rows in zip(sharded["runs"], alone(policy)["runs"]):
        assert largest_difference(some, all_rows) < 1e-5
    one, other = sharded["stats"]
    assert one == other
    (whole,) = alone(policy)["stats"]
    counted = ("rows_in", "rows_kept", "skipped_steps")
    assert [one[name] for name in counted] == [whole[name] for name in counted]
    assert one["rows_kept"] < one["rows_in"]


def test_replay_is_what_makes_the_difference(alone, directory):
    """The control: with replay off, the answer is another one."""
    off = start(directory["whole"], RUNS[:1], {"ASCEND_REPLAY": "0"}, stats=True, **ENGINE).answer()
    assert off["stats"][0]["steps"] == 0
    first, other = off["runs"][0][0]["logprobs"][0][0], alone("final")["runs"][0][0]["logprobs"][0][0]
    assert max(abs(first[t] - other[t]) for t in first) > 1e-4


def test_with_drafts_the_device_counts(directory):
    """Steps with drafts exchange rows by the device's boundaries; a repetitive prompt makes some be accepted."""
    prompt = (tokens(9) * 12)[:101]
    runs = [([prompt, PROMPTS[1]], dict(temperature=0.0, max_tokens=17, logprobs=-1))]
    drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
    # The second prompt is prefilled while the first one decodes with drafts.
    common = dict(speculative_config=drafts, stats=True)
    alone = start(directory["whole"], runs, **common, **ENGINE).answer()
    sharded = start(directory["sp"], runs, PROCESSES, **common, **TWO).answer()
    assert largest_difference(sharded["runs"][0], alone["runs"][0]) < 1e-5
    assert sharded["metrics"]["vllm:spec_decode_num_draft_tokens"] > 0
    assert sharded["stats"][0]["rows_kept"] < sharded["stats"][0]["rows_in"]
