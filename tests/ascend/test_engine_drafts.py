"""The whole engine with a DSpark drafter, in a process of its own."""

import json

from tests.ascend import support


def test_llm_with_drafts():
    """`LLM(...)` with a DSpark drafter: async scheduling, prefix hits, some drafts stand; the tokens are the same."""
    run = support.run_python("-m", "tests.ascend.draft_process")
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    served = [json.loads(line.removeprefix("SERVED ")) for line in run.stdout.splitlines() if "SERVED" in line]
    plain, drafted = served
    assert drafted["async"]
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0
    for result in served:
        assert result["metrics"]["vllm:prefix_cache_hits"] > 0
        assert result["stats"]["rows_kept"] < result["stats"]["rows_in"]
