"""Two data-parallel ranks with real MoE collectives: an idle rank, ranks that disagree about trimming, skips."""

import pytest

from tests.engine.conftest import free_port, largest_difference, start, tokens

pytestmark = pytest.mark.engine

ENGINE = dict(max_num_batched_tokens=37, max_logprobs=-1, max_model_len=256)
SAMPLING = dict(temperature=0.0, max_tokens=9, logprobs=-1)


def run_ranks(model, prompts, settings=None):
    """Answers of both ranks; ``prompts[rank]``."""
    port = free_port()
    processes = [
        start(
            model,
            [(mine, SAMPLING)],
            {
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": str(rank),
                "VLLM_DP_SIZE": "2",
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": str(port),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                **(settings or {}),
            },
            stats=True,
            **ENGINE,
        )
        for rank, mine in enumerate(prompts)
    ]
    return [process.answer() for process in processes]


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param(([tokens(130), tokens(61)], [tokens(3)]), id="one rank soon idle"),
        pytest.param(([tokens(75)], [tokens(101), tokens(7), tokens(5)]), id="ranks that disagree"),
    ],
)
def test_ranks_agree_and_answer_as_one_rank_would(model, prompts):
    alone = start(model, [([p for mine in prompts for p in mine], SAMPLING)], stats=True, **ENGINE)
    expected = alone.answer()["runs"][0]
    ranks = run_ranks(model, prompts)
    got = [output for rank in ranks for output in rank["runs"][0]]
    assert largest_difference(got, expected) < 1e-5
    stats = [rank["stats"][0] for rank in ranks]
    assert max(s["rows_in"] - s["rows_kept"] for s in stats) > 0
    # A rank without kept rows ran one padding row beside the other's.
    assert sum(s["padded_rows"] for s in stats) > 0
