"""The reference model on a GPU: the oracle's results, and no forward that waits for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.oracle import Oracle
from tests.support.stepper import Stepper
from vllm_ascend_replay.reference.config import ReferenceConfig, write_model
from vllm_ascend_replay.reference.moe import MoE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def draw(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def build(tmp_path, settings=None, **overrides) -> tuple[Stepper, Oracle]:
    directory = write_model(tmp_path / "model", "tiny", **{"compute_dtype": "float64", **overrides})
    stepper = Stepper(directory, settings=settings)
    forward = stepper.model.forward

    def without_waiting(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return forward(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    stepper.model.forward = without_waiting
    return stepper, Oracle(stepper.config, stepper.model.weights())


def close(request, want, at: slice = slice(None)) -> None:
    ran = np.flatnonzero(request.kept)[at]
    np.testing.assert_allclose(request.logits[ran].numpy(), want.logits[ran - want.start], rtol=0, atol=1e-10)
    for layer, entering in request.entering.items():
        np.testing.assert_allclose(entering[ran].numpy(), want.entering[layer][ran - want.start], rtol=0, atol=1e-10)


@pytest.mark.parametrize("settings", [None, {"ASCEND_REPLAY": "1"}], ids=["off", "on"])
def test_paged_model_equals_the_oracle(tmp_path, settings):
    stepper, oracle = build(tmp_path, settings)
    first = stepper.add(draw(206), prompt_len=200)
    stepper.run(first, 129, 71)
    second = stepper.add(first.tokens[:96] + draw(70, 1), prompt_len=160, donor=first, hit=96)
    third = stepper.add(draw(150, 2), prompt_len=140, prompt_logprobs=True)
    stepper.step([(first, 1), (second, 40), (third, 63)], pad_tokens=3)
    stepper.step([(first, 1), (second, 32), (third, 77)])
    unfinished = [first, second, third]
    while unfinished := [request for request in unfinished if request.left]:
        stepper.step([(request, 1) for request in unfinished])
    on, window = settings is not None, stepper.config.sliding_window
    cold = oracle.run(first.tokens)
    close(first, oracle.run(first.tokens, floors=oracle.late_floor(200 - window, 206)) if on else cold)
    close(third, oracle.run(third.tokens))
    floors = oracle.late_floor(160 - window, 166, second.replay_start) if on else None
    close(second, oracle.run(second.tokens, start=96 - window, hit=96, donor=cold.sources, floors=floors))
    assert stepper.null_block_untouched()


def test_bfloat16_without_waiting(tmp_path):
    stepper, oracle = build(tmp_path, hidden_size=64, moe_intermediate_size=32, compute_dtype="bfloat16")
    request = stepper.add(draw(120), prompt_len=110)
    stepper.run(request, 70, 40, *[1] * 10)
    got, want = request.logits.double().numpy(), oracle.run(request.tokens).logits
    assert np.isfinite(got).all()
    assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.9


@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_grouped_experts_equal_dense_ones(rows):
    config = ReferenceConfig(hidden_size=64, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=3)
    with torch.device("cuda"):
        moe = MoE(config, 0, dtype=torch.bfloat16, exchange=False)
        x = torch.randn(rows, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(moe._grouped(x), moe._dense(x), rtol=2e-2, atol=2e-2)
