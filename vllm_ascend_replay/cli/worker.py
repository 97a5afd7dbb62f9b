"""One engine in a process of its own: takes a job on standard input, answers in JSON lines on standard output.

Settings are read once per process, so every setting of a comparison needs one. Everything that vLLM prints goes to
standard error.

The job is ``{"model": directory, "engine": {engine argument: value}, "cases": [{"name", "before": [request],
"requests": [request]}], "weights": file}``, a request being the fields of `reference.engine.Request`; ``before`` runs
first and is not reported. The answers are, in order, ``{"ready": {"vllm", "runner", "seconds"}}``, when the model's
weights are in the file (`torch.save`), and for each case ``{"case": name, "run": fields of reference.engine.Run}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    job = json.load(sys.stdin)
    began = time.perf_counter()
    import torch
    import vllm

    from vllm_ascend_replay.reference.engine import Engine, Request

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    engine = Engine(job["model"], **job["engine"])
    torch.save({name: weight.cpu() for name, weight in engine.weights().items()}, job["weights"])
    runner = "v2" if engine.engine.vllm_config.use_v2_model_runner else "v1"
    answer(ready={"vllm": vllm.__version__, "runner": runner, "seconds": time.perf_counter() - began})
    for case in job["cases"]:
        if case["before"]:
            engine.run([Request(**request) for request in case["before"]])
        run = engine.run([Request(**request) for request in case["requests"]])
        answer(case=case["name"], run=asdict(run))
    engine.shutdown()
    # Threads that vLLM leaves behind must not keep the process.
    answers.close()
    os._exit(0)


if __name__ == "__main__":
    main()
