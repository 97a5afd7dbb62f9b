"""Every row of the gate table, in plain words, and the layer plan's errors."""

from types import SimpleNamespace

import pytest
from vllm.config import CUDAGraphMode

from vllm_ascend_replay import support
from vllm_ascend_replay.layer_plan import NotDeepseekV41, read_layer_plan
from vllm_ascend_replay.support import GATES, GRAPH_GATES, graphs_off_reason, unsupported_reason


def hf(**changes):
    values = dict(
        num_hidden_layers=9,
        sliding_window=128,
        compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1],
        kv_source_layer_ids=[2, 5],
        index_source_layer_ids=[2, 5, 7],
        candidate_source_layer_id=5,
        engram_layer_ids=[1],
    )
    return SimpleNamespace(**{**values, **changes})


def config(hf_config=None, **changes):
    parts = {
        "parallel_config": dict(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_size=1,
            use_ubatching=False,
        ),
        "model_config": dict(
            hf_text_config=hf_config or hf(),
            enforce_eager=True,
            enable_prompt_embeds=False,
            runner_type="generate",
            enable_return_routed_experts=False,
        ),
        "cache_config": dict(enable_prefix_caching=True, swa_bounded_replay=True),
        "compilation_config": dict(cudagraph_mode=CUDAGraphMode.NONE),
    }
    top = dict(speculative_config=None, lora_config=None, kv_transfer_config=None, use_v2_model_runner=True)
    for name, value in changes.items():
        for part in parts.values():
            if name in part:
                part[name] = value
                break
        else:
            top[name] = value
    return SimpleNamespace(**top, **{name: SimpleNamespace(**part) for name, part in parts.items()})


MODEL = SimpleNamespace()


def test_supported():
    assert unsupported_reason(config(), MODEL) is None
    assert unsupported_reason(config(), None) is None


CASES = {
    "model-runner": (config(use_v2_model_runner=False), MODEL, "VLLM_USE_V2_MODEL_RUNNER=1"),
    "pipeline-parallel": (config(pipeline_parallel_size=2), MODEL, "pipeline parallelism (size 2)"),
    "decode-context-parallel": (config(decode_context_parallel_size=4), MODEL, "(size 4)"),
    "prefill-context-parallel": (config(prefill_context_parallel_size=2), MODEL, "prefill context"),
    "microbatching": (config(use_ubatching=True), MODEL, "--enable-dbo"),
    "lora": (config(lora_config=object()), MODEL, "LoRA"),
    "prompt-embeds": (config(enable_prompt_embeds=True), MODEL, "--enable-prompt-embeds"),
    "no-late-layer": (config(hf(kv_source_layer_ids=[2, 8], index_source_layer_ids=[2, 8])), MODEL, "(layer 8)"),
    "late-compression": (
        config(hf(compress_ratios=[0, 0, 2, 2, 2, 2, 1, 1, 1])),
        MODEL,
        "compress ratio 2; replay needs 1",
    ),
    "cut-index-source": (config(hf(index_source_layer_ids=[2, 7])), MODEL, "cut layer 5 is not an index source"),
    "candidate-source": (config(hf(candidate_source_layer_id=2)), MODEL, "layer 2, before the cut"),
    "late-engram": (config(hf(engram_layer_ids=[1, 5])), MODEL, "layers [5]"),
    "drafter": (config(speculative_config=SimpleNamespace(method="eagle3")), MODEL, "'eagle3'"),
    "pooling": (config(runner_type="pooling"), MODEL, "pooling"),
    "routed-experts": (config(enable_return_routed_experts=True), MODEL, "--enable-return-routed-experts"),
    "kv-connector": (config(kv_transfer_config=object()), MODEL, "KV connector"),
    "recompute-scheduler": (config(), SimpleNamespace(relabels_prefill_as_decode=True), "recompute_scheduler_enable"),
    "prefix-cache": (config(swa_bounded_replay=False), MODEL, "--no-enable-prefix-caching"),
    "mixed-graphs": (
        config(enforce_eager=False, cudagraph_mode=CUDAGraphMode.FULL),
        MODEL,
        "cudagraph_mode FULL runs prefills in FULL graphs",
    ),
    "unbreakable-graphs": (
        config(enforce_eager=False, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        MODEL,
        "cudagraph_mode FULL_AND_PIECEWISE",
    ),
    "sharded-model-graphs": (
        config(enforce_eager=False, cudagraph_mode=CUDAGraphMode.PIECEWISE),
        SimpleNamespace(shards_tokens=True),
        "states are exchanged outside graphs",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_gate_names_its_reason(name, monkeypatch):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1" if name == "sharded-model-graphs" else "0")
    vllm_config, model, words = CASES[name]
    reason = unsupported_reason(vllm_config, model)
    assert reason is not None
    assert words in reason


def test_every_gate_has_a_case():
    assert {gate.name for gate in GATES} - set(CASES) == {"dp-coordination"}
    assert len({gate.name for gate in GATES}) == len(GATES)


def test_dp_coordination(monkeypatch):
    import vllm.v1.worker.dp_utils as dp_utils

    monkeypatch.setattr(dp_utils, "should_skip_dp_coordination", lambda: True)
    assert unsupported_reason(config(), MODEL) is None
    assert "data-parallel all-reduce" in unsupported_reason(config(data_parallel_size=2), MODEL)


def test_sharded_states_are_fine_where_the_host_knows_how_they_lie():
    assert unsupported_reason(config(), SimpleNamespace(shards_tokens=True)) is None
    assert unsupported_reason(config(prefill_context_parallel_size=2), SimpleNamespace(shares_context=True)) is None


DSPARK = SimpleNamespace(runs_dspark=True)


def dspark(**changes):
    draft = SimpleNamespace(**{"sliding_window": 128, **changes})
    model = SimpleNamespace(hf_text_config=draft)
    return config(speculative_config=SimpleNamespace(method="dspark", draft_model_config=model))


def test_dspark_is_fine_where_it_reads_the_kept_rows_only():
    assert unsupported_reason(dspark(), DSPARK) is None
    assert unsupported_reason(dspark(sliding_window=64, layer_types=["sliding_attention"] * 3), DSPARK) is None


@pytest.mark.parametrize(
    ("changes", "model", "words"),
    [
        ({"sliding_window": 129}, DSPARK, "its window is 129 tokens, the model's 128"),
        ({"sliding_window": None}, DSPARK, "it has no sliding window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, DSPARK, "it has layers of full_attention"),
        ({}, MODEL, "'dspark' is not one that this host runs"),
        ({}, SimpleNamespace(runs_dspark=True, shards_tokens=True), "sequence or context parallelism"),
    ],
)
def test_dspark_is_refused_by_what_was_found(changes, model, words):
    reason = unsupported_reason(dspark(**changes), model)
    assert reason.startswith("the drafter 'dspark' ")
    assert words in reason


@pytest.mark.parametrize("method", [None, "ngram"])
def test_ngram_is_fine(method):
    assert unsupported_reason(config(speculative_config=SimpleNamespace(method=method)), MODEL) is None


def test_graph_modes(monkeypatch):
    def mode(m, reason=unsupported_reason):
        return reason(config(enforce_eager=False, cudagraph_mode=m), MODEL)

    def switch(on):
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1" if on else "0")

    switch(False)
    assert mode(CUDAGraphMode.NONE) is None
    assert mode(CUDAGraphMode.FULL_DECODE_ONLY) is None
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH=1" in mode(CUDAGraphMode.PIECEWISE)
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH=1" in mode(CUDAGraphMode.FULL_AND_PIECEWISE)
    assert "FULL" in mode(CUDAGraphMode.FULL)
    switch(True)
    assert mode(CUDAGraphMode.PIECEWISE) is None
    assert mode(CUDAGraphMode.FULL_AND_PIECEWISE) is None
    assert "FULL" in mode(CUDAGraphMode.FULL)
    monkeypatch.setenv("ASCEND_REPLAY_POLICY", "chunk")
    assert mode(CUDAGraphMode.FULL) is None


def test_each_graph_gate_names_its_reason(monkeypatch):
    graphs = CUDAGraphMode

    def reason(mode=graphs.FULL_DECODE_ONLY, eager=False, breakable=True, device=True, model=MODEL, **changes):
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1" if breakable else "0")
        monkeypatch.setattr(support, "_device_has_graphs", lambda: device)
        return graphs_off_reason(config(enforce_eager=eager, cudagraph_mode=mode, **changes), model)

    for mode in (graphs.NONE, graphs.FULL_DECODE_ONLY, graphs.PIECEWISE, graphs.FULL_AND_PIECEWISE):
        assert reason(mode) is None
    words = {
        "eager": (reason(eager=True), "--enforce-eager"),
        "sharded-states": (reason(model=SimpleNamespace(shards_tokens=True)), "sequence or context parallelism"),
        "device-graphs": (reason(device=False), "this device"),
        "breakable": (reason(breakable=False), "VLLM_USE_BREAKABLE_CUDAGRAPH=1"),
        "full-graphs": (reason(graphs.FULL), "cudagraph_mode FULL "),
    }
    assert set(words) == {gate.name for gate in GRAPH_GATES}
    assert reason(prefill_context_parallel_size=2) == words["sharded-states"][0]
    for found, expected in words.values():
        assert expected in found


def test_prefix_caching_off_or_capped_is_fine():
    assert unsupported_reason(config(swa_bounded_replay=False, enable_prefix_caching=False), MODEL) is None
    assert unsupported_reason(config(swa_bounded_replay=False), SimpleNamespace(caps_prefix_hits=True)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_source_layer_ids": None}, "kv_source_layer_ids: it is not a DeepSeek-V4.1 model"),
        ({"compress_ratios": [0, 1]}, "2 entries for 9 layers"),
        ({"sliding_window": -1}, "the model has no window"),
        ({"kv_source_layer_ids": [2, 9]}, "do not fit 9 layers"),
    ],
)
def test_a_model_that_is_not_v41(changes, words):
    with pytest.raises(NotDeepseekV41, match=words.replace("(", r"\(")):
        read_layer_plan(hf(**changes))
    assert words in unsupported_reason(config(hf(**changes)), MODEL)


def test_a_setting_that_does_not_fit_the_model(monkeypatch):
    monkeypatch.setenv("ASCEND_REPLAY_KEEP", "100")
    assert "window, 128" in unsupported_reason(config(), MODEL)
