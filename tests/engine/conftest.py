"""Engines in processes of their own: settings are read once per process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm_ascend_replay.reference.config import write_model

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "vllm_ascend_replay",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # The test's own functions travel to engine processes by name.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "PYTHONPATH": str(ROOT),
}
ENGINE = dict(
    max_model_len=512, max_num_seqs=8, max_num_batched_tokens=37, kv_cache_memory_bytes=64 << 20, block_size=16
)


class Process:
    """A started engine process; `answer` waits for it."""

    def __init__(self, job, settings):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ASCEND_REPLAY")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.llm_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**environment, **ENVIRONMENT, **settings},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job))
        self.process.stdin.close()
        self.process.stdin = None
        self.log = ""

    def finish(self):
        """Exit code and standard error."""
        out, self.log = self.process.communicate(timeout=540)
        return self.process.returncode, out

    def answer(self):
        code, out = self.finish()
        assert code == 0, self.log[-6000:]
        return json.loads(out.splitlines()[-1])


def start(model, runs, settings=None, stats=False, **engine):
    """Start an engine; ``runs`` is a list of ``(prompts, sampling)``."""
    job = {
        "model": str(model),
        "engine": {**ENGINE, **engine},
        "runs": [{"prompts": p, "sampling": s} for p, s in runs],
        "stats": stats,
    }
    return Process(job, settings or {})


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def tokens(length, seed=0):
    """A prompt of random token ids."""
    return np.random.default_rng(1000 * length + seed).integers(3, 97, length).tolist()


def largest_difference(a, b):
    """Largest |difference| of log-probabilities over the same generated tokens of two runs."""
    worst = 0.0
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x["tokens"] == y["tokens"]
        for steps, others in zip(x["logprobs"], y["logprobs"]):
            for step, other in zip(steps, others):
                assert step.keys() == other.keys()
                worst = max([worst, *(abs(step[t] - other[t]) for t in step)])
    return worst


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The tiny model (window 8, three late layers) in float64."""
    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory, "tiny", compute_dtype="float64")
    return directory
