"""One engine in a process of its own: prompts in, tokens, log-probabilities, counters and the log out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

_ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
job = json.loads(sys.stdin.readline())
llm = LLM(**job["engine"])
params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False, logprobs=5)
outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], params, use_tqdm=False)
answer = {"tokens": [list(o.outputs[0].token_ids) for o in outputs],
          "logprobs": [[{t: p.logprob for t, p in row.items()} for row in o.outputs[0].logprobs] for o in outputs],
          "stats": llm.collective_rpc("ascend_replay_stats") if job["stats"] else []}
print("ANSWER" + json.dumps(answer), flush=True)
llm.llm_engine.engine_core.shutdown()
"""


@dataclass
class Run:
    tokens: list[list[int]]
    logprobs: list[list[dict[str, float]]]
    stats: list[dict[str, Any]]
    """Counters of each worker; empty where replay is off."""
    log: str


def run_engine(engine: dict[str, Any], prompts: list[list[int]], tokens: int, **environ: str) -> Run:
    """Run the prompts together in a new engine.

    Args:
        engine: arguments of vLLM's ``LLM``.
        prompts: token ids.
        tokens: how many to generate for each.
        environ: variables beside this process's.
    """
    job = {"engine": engine, "prompts": prompts, "tokens": tokens, "stats": environ.get("ASCEND_REPLAY") != "0"}
    done = subprocess.run(
        [sys.executable, "-c", _ENGINE],
        input=json.dumps(job) + "\n",
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert done.returncode == 0, done.stdout[-4000:]
    assert answers, done.stdout[-4000:]
    return Run(**json.loads(answers[0].removeprefix("ANSWER")), log=done.stdout)


def worst(a: Run, b: Run) -> float:
    """Largest difference of log-probabilities that both runs name, up to each prompt's first differing token."""
    differences = [0.0]
    for ours, theirs, left, right in zip(a.logprobs, b.logprobs, a.tokens, b.tokens):
        for row, other, x, y in zip(ours, theirs, left, right):
            differences += [abs(row[token] - other[token]) for token in row.keys() & other.keys()]
            if x != y:
                break
    return max(differences)
