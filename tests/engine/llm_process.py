"""vLLM's ``LLM`` in a process of its own: a job as JSON on standard input, the outputs as one JSON line.

Job: ``{"model", "engine": {LLM argument: value}, "stats": bool, "runs": [{"prompts": [[token]], "sampling": {}}]}``.
"""

import json
import os
import sys


def replay_stats(worker):
    """The worker's counters (for ``collective_rpc``)."""
    from vllm_ascend_replay import stats

    return stats.snapshot()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    arguments = dict(
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        seed=0,
        disable_log_stats=False,
    )
    llm = LLM(job["model"], **{**arguments, **job["engine"]})
    runs = []
    for run in job["runs"]:
        params = SamplingParams(detokenize=False, ignore_eos=True, **run["sampling"])
        outputs = llm.generate([{"prompt_token_ids": p} for p in run["prompts"]], params, use_tqdm=False)
        runs.append(
            [
                {
                    "tokens": [list(c.token_ids) for c in output.outputs],
                    "logprobs": [
                        [{str(t): e.logprob for t, e in step.items()} for step in c.logprobs or []]
                        for c in output.outputs
                    ],
                }
                for output in outputs
            ]
        )
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    stats = llm.collective_rpc(replay_stats) if job.get("stats") else None
    answers.write(json.dumps({"runs": runs, "metrics": metrics, "stats": stats}) + "\n")
    answers.close()
    llm.llm_engine.engine_core.shutdown()
    # Threads that vLLM leaves behind must not keep the process (nor, under DP, wait for the other rank).
    os._exit(0)


if __name__ == "__main__":
    main()
