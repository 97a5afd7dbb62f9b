"""The model in vLLM's real engine, replay off: greedy tokens and log-probabilities are the oracle's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from vllm_ascend_replay.reference.config import write_model
from vllm_ascend_replay.reference.engine import Engine, Request, RequestRun, prepare_environment
from vllm_ascend_replay.reference.oracle import Oracle

PROMPTS = {"short": 5, "long": 150, "middle": 67, "odd": 37}


@pytest.fixture(scope="module", params=["float32", "float64"])
def engine_and_oracle(request, tmp_path_factory) -> Iterator[tuple[Engine, Oracle]]:
    directory = write_model(tmp_path_factory.mktemp("model"), "tiny", compute_dtype=request.param)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in prepare_environment({"ASCEND_REPLAY": "0"}).items():
            patch.setenv(name, value)
        engine = Engine(
            str(directory),
            block_size=16,
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=48,
            kv_cache_memory_bytes=32 << 20,
            enable_prefix_caching=True,
        )
        config = engine.engine.model_config.hf_config
        yield engine, Oracle(config, engine.weights())
        engine.shutdown()


def prompt(name: str, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, PROMPTS[name]]).integers(0, 97, PROMPTS[name]).tolist()


def check(run: RequestRun, ids: list[int], oracle: Oracle, *, hit: int = 0) -> None:
    """Tokens and log-probabilities are the oracle's; the oracle is shown the engine's tokens, so one slip is one."""
    (prefill,) = run.prefills
    start = prefill.replay_start
    donor = oracle.run(ids).sources if hit else None
    want = oracle.run(ids + run.tokens, start=start, hit=hit, donor=donor).logprobs()
    rows = want[len(ids) - 1 - start : -1]
    np.testing.assert_allclose(np.array(run.logprobs), rows, rtol=0, atol=1e-5)
    assert run.tokens == rows.argmax(-1).tolist()
    if run.prompt_logprobs is not None:
        np.testing.assert_allclose(np.array(run.prompt_logprobs), want[: len(ids) - 1], rtol=0, atol=1e-5)


def test_cold_prompts_in_chunks_beside_decodes(engine_and_oracle):
    engine, oracle = engine_and_oracle
    requests = [Request(name, prompt(name), 6, at_step=step) for step, name in enumerate(PROMPTS)]
    run = engine.run(requests)
    for request in requests:
        assert run.requests[request.name].prefills[0].replay_start == 0
        check(run.requests[request.name], request.prompt, oracle)
    assert run.requests["long"].prefills[0].chunks > 3


def test_prompt_logprobs(engine_and_oracle):
    engine, oracle = engine_and_oracle
    requests = [Request("middle", prompt("middle", 5), 3, prompt_logprobs=True), Request("odd", prompt("odd", 5), 3)]
    run = engine.run(requests)
    for request in requests:
        check(run.requests[request.name], request.prompt, oracle)


def test_prefix_hit_is_replayed_on_the_encoder_side(engine_and_oracle):
    engine, oracle = engine_and_oracle
    ids = prompt("long", 6)
    engine.run([Request("cold", ids, 1)])
    run = engine.run([Request("hit", ids, 6)]).requests["hit"]
    window = oracle.config.sliding_window
    assert run.prefills[0].replay_start == 144 - window
    check(run, ids, oracle, hit=144)
