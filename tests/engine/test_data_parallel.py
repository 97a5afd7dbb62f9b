"""Two data-parallel ranks with real MoE collectives: an idle rank, ranks that disagree about trimming, skips."""

import pytest

from tests.engine.conftest import free_port, largest_difference, start, tokens

pytestmark = pytest.mark.engine

ENGINE = dict(max_num_batched_tokens=37, max_logprobs=-1, max_model_len=256)
SAMPLING = dict(temperature=0.0, max_tokens=9, logprobs=-1)


# By rank, one after the other: ranks that disagree about what they trim, and a second rank that is idle soon.
TURNS = [([tokens(75)], [tokens(101), tokens(7), tokens(5)]), ([tokens(130), tokens(61)], [tokens(3)])]


def run_ranks(model):
    """Answers of both ranks."""
    port = free_port()
    processes = [
        start(
            model,
            [(turn[rank], SAMPLING) for turn in TURNS],
            {
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": str(rank),
                "VLLM_DP_SIZE": "2",
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": str(port),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            },
            stats=True,
            **ENGINE,
        )
        for rank in range(2)
    ]
    return [process.answer() for process in processes]


def test_ranks_agree_and_answer_as_one_rank_would(model):
    alone = start(model, [(first + second, SAMPLING) for first, second in TURNS], stats=True, **ENGINE)
    expected = alone.answer()["runs"]
    ranks = run_ranks(model)
    for turn, want in enumerate(expected):
        got = [output for rank in ranks for output in rank["runs"][turn]]
        assert largest_difference(got, want) < 1e-5
    stats = [rank["stats"][0] for rank in ranks]
    assert min(s["rows_in"] - s["rows_kept"] for s in stats) > 0
    # A rank without kept rows ran one padding row beside the other's.
    assert sum(s["padded_rows"] for s in stats) > 0
