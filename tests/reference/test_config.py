"""The reference model's configuration: presets, round trips, and clear errors for values that describe no model."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from vllm_ascend_replay import reference
from vllm_ascend_replay.layer_plan import read_layer_plan
from vllm_ascend_replay.reference.config import PRESETS, ReferenceConfig, write_model


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_read_back_as_written(tmp_path, preset):
    reference.register()
    directory = write_model(tmp_path / "model", preset, weight_seed=3)
    config = AutoConfig.from_pretrained(directory)
    assert isinstance(config, ReferenceConfig)
    assert config.weight_seed == 3
    for name, value in PRESETS[preset].items():
        got = getattr(config, name)
        assert (tuple(got) if isinstance(value, tuple) else got) == value
    assert json.loads((directory / "config.json").read_text())["architectures"] == [reference.ARCHITECTURE]


def test_the_core_reads_the_same_plan():
    config = ReferenceConfig()
    plan = read_layer_plan(config)
    assert (plan.cut, plan.num_layers, plan.window) == (config.cut, 9, 8)
    flash = read_layer_plan(ReferenceConfig(**PRESETS["v41-flash-plan"]))
    assert (flash.cut, flash.num_layers, flash.num_late_layers, flash.window) == (20, 40, 19, 128)
    one = read_layer_plan(ReferenceConfig(**PRESETS["tiny-one-late-layer"]))
    assert one.num_late_layers == 1


def test_sources_of_a_layer():
    config = ReferenceConfig(**PRESETS["v41-flash-plan"])
    assert [config.kv_source(i) for i in (0, 1, 2, 7, 8, 19, 20, 39)] == [None, None, 2, 2, 8, 14, 20, 20]
    assert [config.index_source(i) for i in (1, 2, 19, 23, 24, 39)] == [None, 2, 14, 20, 24, 36]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"head_dim": 16.0}, "head_dim is 16.0"),
        ({"compress_ratios": (0, 4, 1)}, "0, 1 and 2 only"),
        ({"kv_source_layer_ids": ()}, "kv_source_layer_ids is empty"),
        ({"kv_source_layer_ids": (5, 2)}, "rise strictly"),
        ({"kv_source_layer_ids": (3, 5), "index_source_layer_ids": (3, 5)}, "layer 2 reads compressed KV before"),
        ({"kv_source_layer_ids": (2, 6), "index_source_layer_ids": (2, 6)}, "layer 5 has ratio 1"),
        ({"index_source_layer_ids": (2, 7)}, "every KV source"),
        ({"candidate_source_layer_id": 6}, "candidate source 6"),
        ({"candidate_source_layer_id": 2}, "after the candidate source"),
        ({"engram_layer_ids": (5,)}, "before the cut"),
        ({"aux_hidden_state_layers": (9,)}, "within 0..8"),
        ({"engram_max_ngram": 1}, "engram_max_ngram"),
        ({"o_groups": 3}, "o_groups 3"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim 3"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"compute_dtype": "float16"}, "compute_dtype is 'float16'; allowed"),
        (
            {"compress_ratios": (0, 0, 2, 2), "kv_source_layer_ids": (2,), "index_source_layer_ids": (2,)},
            "must have ratio 1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_values_that_describe_no_model(tmp_path, values, message):
    plan = {"candidate_source_layer_id": -1, "aux_hidden_state_layers": ()} if "compress_ratios" in values else {}
    with pytest.raises(ValueError, match=message):
        write_model(tmp_path / "model", **{**plan, **values})


def test_unknown_names(tmp_path):
    with pytest.raises(ValueError, match=r"'big'; allowed: tiny"):
        write_model(tmp_path, "big")
    with pytest.raises(ValueError, match="windw: no field"):
        write_model(tmp_path, windw=8)


def test_overrides_made_after_the_constructor_are_checked_too():
    config = ReferenceConfig()
    config.update({"num_hidden_layers": 3})
    with pytest.raises(ValueError, match="num_hidden_layers is 3, compress_ratios names 9 layers"):
        config.validate()
