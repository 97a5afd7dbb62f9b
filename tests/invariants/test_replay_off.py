"""What replay costs where it does nothing: nothing. And replay off is vLLM's plain model state, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata

from tests.invariants.support import CHUNK, EXACT, FINAL, OFF, counted

ON = pytest.mark.parametrize("settings", [FINAL, CHUNK, EXACT], ids=["final", "chunk", "exact"])


class Starts(ModelSpecificAttnMetadata):
    def __init__(self, starts: torch.Tensor) -> None:
        self.starts = starts

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        return {"replay_start": self.starts} if attn_metadata_builder.takes_replay_start else {}


class PlainState(DefaultModelState):
    """vLLM's default state with the encoder side and the token lookback written down anew, row by row."""

    def __init__(self, vllm_config, model, encoder_cache, device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.depth, self.window, self.starts = model.token_lookback_depth, model.window, {}

    def add_request(self, req_index, new_req_data) -> None:
        super().add_request(req_index, new_req_data)
        self.starts[req_index] = new_req_data.replay_start

    def prepare_inputs(self, input_batch, req_states):
        lookback = torch.full((self.max_num_reqs, self.depth), -1, dtype=torch.int32)
        for row, index in enumerate(input_batch.idx_mapping_np):
            computed = int(req_states.num_computed_tokens.gpu[index])
            for back in range(min(self.depth, computed)):
                lookback[row, back] = req_states.all_token_ids.gpu[index, computed - 1 - back]
        return {**super().prepare_inputs(input_batch, req_states), "lookback_token_ids": lookback}

    def prepare_attn(self, input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config):
        starts = torch.zeros(input_batch.num_reqs, dtype=torch.int32)
        for row, index in enumerate(input_batch.idx_mapping_np):
            start = self.starts[index]
            if not start or not input_batch.is_prefilling_np[row]:
                continue
            starts[row] = start
            for token in range(int(input_batch.query_start_loc[row]), int(input_batch.query_start_loc[row + 1])):
                if start <= input_batch.positions[token] < start + self.window:
                    for group, spec in enumerate(kv_cache_config.kv_cache_groups):
                        if spec.kv_cache_spec.prefix_cacheable:
                            slot_mappings[group, token] = -1
        return super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            model_specific_attn_metadata=Starts(starts),
        )


def run_everything(stepper, tokens) -> list[torch.Tensor]:
    """Chunks, decodes, a hit, padding, preemption and prompt log-probabilities; every output and all pages."""
    outputs = []

    def step(*work: Any, **kwargs: Any) -> None:
        report = stepper.step(work, **kwargs)
        outputs.extend((report.hidden.clone(), *(aux.clone() for aux in report.aux)))

    donor = stepper.add(tokens(60), prompt_len=50)
    keeps = stepper.add(tokens(30, seed=1), prompt_len=25, prompt_logprobs=True)
    step((donor, 31), (keeps, 11), pad_tokens=2)
    step((donor, 19), (keeps, 14))
    hit = stepper.add(donor.tokens[:32] + tokens(30, seed=2), prompt_len=57, donor=donor, hit=32)
    step((donor, 1), (keeps, 1), (hit, 5), pad_tokens=1)
    step((donor, 1), (hit, 14))
    stepper.preempt(keeps)
    step((donor, 1), (hit, 14))
    stepper.resume(keeps)
    step((donor, 1), (hit, 1), (keeps, 26))
    step((donor, 1), (hit, 1), (keeps, 1), pad_tokens=3)
    return [*outputs, stepper.pages.clone()]


def test_replay_off_is_the_plain_state_bit_for_bit(make_small, tokens):
    off, _ = make_small(settings=OFF)
    plain_values = run_everything(off, tokens)
    plain, _ = make_small(settings={**OFF, "ASCEND_REPLAY_LOG_EVERY": "1"})
    state = PlainState(plain.vllm_config, plain.model, None, plain.device)
    kept_state, plain.state = plain.state, state
    try:
        values = run_everything(plain, tokens)
    finally:
        plain.state = kept_state
    assert len(values) == len(plain_values) > 10
    for ours, theirs in zip(plain_values, values):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7)) if ours.is_floating_point() else True
        assert ours.is_floating_point() or torch.equal(ours, theirs)


def test_the_comparison_with_the_plain_state_can_fail(make_small, tokens):
    off, _ = make_small(settings=OFF)
    plain = run_everything(off, tokens)
    on, _ = make_small(settings=FINAL)
    assert not all(torch.equal(a, b) for a, b in zip(plain, run_everything(on, tokens)))


def decode_steps(stepper, tokens):
    """The work of: decodes after a trimmed prompt, a hit and a prompt that keeps every row."""
    donor = stepper.add(tokens(50), prompt_len=40)
    stepper.run(donor, 19, 21)
    hit = stepper.add(donor.tokens[:32] + tokens(18, seed=2), prompt_len=44, donor=donor, hit=32)
    keeps = stepper.add(tokens(30, seed=1), prompt_len=25, prompt_logprobs=True)
    stepper.step([(hit, 20), (keeps, 25)])
    with counted(stepper) as work:
        stepper.step([(donor, 1), (hit, 1), (keeps, 1)])
        stepper.step([(donor, 1), (hit, 3), (keeps, 2)], device_query_lens=[1, 2, 3], pad_tokens=2)
    return work


@ON
def test_a_decode_step_costs_nothing_more(make_small, tokens, settings):
    """No launch, operator or upload beyond those of replay off; collectives are refused."""
    off = decode_steps(make_small(settings=OFF)[0], tokens)
    on = decode_steps(make_small(settings=settings)[0], tokens)
    assert (on.launches, on.operators, on.uploads) == (off.launches, off.operators, off.uploads)
    assert on.operators.total() > 100
    assert (on.launches, on.uploads) == ([], 0)


@ON
def test_a_prefill_without_a_bounded_prompt_costs_no_operator(make_small, tokens, settings):
    def work(settings):
        stepper, _ = make_small(settings=settings)
        # The buffers are made, and their kernels compiled, by the first batch: at start-up.
        stepper.run(stepper.add(tokens(3)))
        requests = [stepper.add(tokens(8, seed=n), prompt_len=8) for n in (1, 2)]
        keeps = stepper.add(tokens(40), prompt_logprobs=True)
        with counted(stepper) as work:
            stepper.step([(requests[0], 8), (requests[1], 5), (keeps, 33)])
            stepper.step([(requests[1], 3), (keeps, 7)])
        return work

    off, on = work(OFF), work(settings)
    assert (on.launches, on.uploads) == (off.launches, off.uploads) == ([], 0)
    assert on.operators == off.operators


@ON
def test_uploads_happen_with_prefills_only(make_small, tokens, settings):
    stepper, _ = make_small(settings=settings)
    donor = stepper.add(tokens(50), prompt_len=40)
    stepper.run(donor, 40)
    hit = stepper.add(donor.tokens[:32] + tokens(30, seed=2), prompt_len=60, donor=donor, hit=32)
    with counted(stepper) as work:
        stepper.step([(donor, 1), (hit, 15)])
    # The replay starts; and the replay batch, one upload, if it is not skipped.
    assert work.uploads == 2
    stepper.run(hit, hit.prefill_len - hit.computed)
    with counted(stepper) as work:
        stepper.step([(donor, 1), (hit, 1)])
    assert work.uploads == 0


@ON
def test_a_replay_step_launches_three_kernels(make_small, tokens, settings):
    """The control of the counters, and what 7.2 of the design promises: gather the batch, the states, scatter once."""
    stepper, _ = make_small(settings=settings)
    stepper.run(stepper.add(tokens(3)))
    request = stepper.add(tokens(60))
    with counted(stepper) as work:
        stepper.step([(request, 60)])
    assert [name for name, _ in work.launches] == [
        "_gather_batch_kernel",
        "_gather_states_kernel",
        "_scatter_rows_kernel",
    ]
    assert work.uploads == 1
