"""When replay is off: one warning in plain words, and vllm-ascend serves exactly as without the package."""

import logging

import pytest
import torch

from tests.ascend import support
from tests.ascend.support import (
    ARCHITECTURE,
    holder_of,
    is_untouched,
    make_session,
    register,
    settings,
    without_package,
)
from tests.npu_emulator.session import tokens
from vllm_ascend_replay import plugin
from vllm_ascend_replay.ascend import model, off_reason, prefix_cap, seams
from vllm_ascend_replay.ascend.metadata import unreachable_pages
from vllm_ascend_replay.config import SettingError

LOG = "vllm.vllm_ascend_replay"
PROMPTS = {"a": tokens(300, 1), "b": tokens(150, 2)}


@pytest.fixture
def messages():
    """Warnings of this package, in order."""
    records = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger(LOG)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.setLevel(level)
    logger.removeHandler(handler)


_without: dict = {}


def without(**overrides):
    """What vllm-ascend computes without the package: {request: (tokens, rows)}."""
    key = repr(overrides)
    if key not in _without:
        s = make_session(replay=False, **overrides)
        s.run(PROMPTS, 200, max_tokens=3)
        _without[key] = outcome(s)
    return _without[key]


def outcome(session):
    return {k: (t.output, torch.cat([r.hidden for r in t.rows])) for k, t in session.traces.items() if k in PROMPTS}


def assert_as_without(session, **overrides):
    session.run(PROMPTS, 200, max_tokens=3)
    assert all(x.kept == -1 for x in session.steps)
    want, got = without(**overrides), outcome(session)
    assert want.keys() == got.keys()
    for k in want:
        assert want[k][0] == got[k][0]
        assert torch.equal(want[k][1], got[k][1])


def off_messages(messages):
    return [m for m in messages if "decoder replay is off" in m]


# ---- gates through the engine ---------------------------------------------------------------------------------------

NO_LATE = {
    "num_hidden_layers": 6,
    "compress_ratios": [0, 0, 2, 2, 2, 1],
    "kv_source_layer_ids": [2, 5],
    "index_source_layer_ids": [2, 5],
    "candidate_source_layer_id": 5,
}


def test_a_gate_on_the_model(messages):
    s = make_session(**NO_LATE)
    assert off_messages(messages) == [
        "decoder replay is off: no layer comes after the last KV source (layer 5), so there is nothing to trim"
    ]
    assert type(s.rank.state).__name__ == "EngramModelState"
    assert_as_without(s, **NO_LATE)


def test_a_gate_on_vllm_ascends_own_options():
    from tests.npu_emulator.tiny import make_vllm_config

    without_package()
    with settings():
        register()
        config = make_vllm_config()
        assert off_reason(config) is None
        config.additional_config = {"scheduler_config": {"recompute_scheduler_enable": True}}
        assert "recompute scheduler" in off_reason(config)


def test_a_gate_on_prefix_caching(messages, monkeypatch):
    """Without the cap, prefix caching turns replay off."""
    monkeypatch.setattr(prefix_cap, "install", lambda: None)
    s = make_session(engine={"enable_prefix_caching": True})
    assert len(off_messages(messages)) == 1
    assert "--no-enable-prefix-caching" in off_messages(messages)[0]
    assert_as_without(s)


def test_supported_says_so_in_one_line(messages):
    make_session(graphs=0)
    assert [m for m in messages if "decoder replay" in m] == [
        m for m in messages if m.startswith("decoder replay is on: policy final, layers 4-7 of 8")
    ]
    assert len(messages) == 1


def test_a_bad_number_of_rows_stops_start_up():
    with pytest.raises(SettingError, match="ASCEND_REPLAY_KEEP is 7"):
        make_session(keep=7)


# ---- page addresses -------------------------------------------------------------------------------------------------


def test_page_addresses():
    small = torch.empty(2**15, 128, 1, 512, device="meta")
    assert unreachable_pages({"layers.4.swa_cache": [small]}) is None
    large = torch.empty(2**16, 128, 1, 512, device="meta")
    reason = unreachable_pages({"layers.3.swa_cache": [small], "layers.4.swa_cache": [(small, large)]})
    assert "layers.4.swa_cache has 65536 pages of 65536 elements" in reason
    assert "--num-gpu-blocks-override 65535" in reason


def test_page_addresses_turn_replay_off(messages, monkeypatch):
    from vllm_ascend_replay.ascend import metadata

    monkeypatch.setattr(metadata, "ADDRESSABLE", 1000)
    s = make_session()
    assert_as_without(s)
    assert len(off_messages(messages)) == 1
    assert "page addresses wrap at 2^32" in off_messages(messages)[0]


# ---- off, moved, standing down ---------------------------------------------------------------------------------------


def test_the_off_switch_is_silent_and_touches_nothing(messages):
    without_package()
    assert is_untouched()
    with settings(enabled=0):
        plugin.register()
    assert is_untouched()
    assert messages == []


def test_switched_off_after_registration(messages):
    """A process that registered and then finds replay switched off (vLLM's flag, say) runs the parent's layers."""
    without_package()
    with settings():
        register()
    with settings(enabled=0):
        from tests.npu_emulator.rank import Rank
        from tests.npu_emulator.session import Session
        from tests.npu_emulator.tiny import make_vllm_config

        s = Session(Rank(make_vllm_config()))
    assert s.rank.text.replay_tail is None
    assert off_messages(messages) == []
    assert_as_without(s)


def test_registration_in_both_orders():
    import vllm_ascend
    from vllm import ModelRegistry

    def ours():
        return ModelRegistry.models[ARCHITECTURE].module_name == model.__name__

    without_package()
    with settings():
        plugin.register()
        assert ours()
        vllm_ascend.register_model()
        assert ours()
        plugin.register()
        assert ours()
    without_package()
    vllm_ascend.register_model()
    assert not ours()
    with settings():
        plugin.register()
    assert ours()
    assert ModelRegistry.models[ARCHITECTURE].load_model_cls().__mro__[1].__name__ == "AscendDeepseekV41ForCausalLM"


@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: seam[1])
def test_a_moved_seam_is_named(seam, monkeypatch):
    module_name, path, names = seam
    holder, attribute = holder_of(module_name, path)
    monkeypatch.setattr(holder, attribute, None)
    assert f"{module_name}.{path}" in seams.missing_seam()
    monkeypatch.undo()
    assert seams.missing_seam() is None
    if names:
        monkeypatch.setattr(holder, attribute, lambda unrelated: None)
        assert names[0] in seams.missing_seam()


def forget_classes():
    """Both our cache and vLLM's of the class behind the architecture."""
    from vllm.model_executor.models import registry

    model._model_cls.cache_clear()
    registry._try_load_model_cls.cache_clear()


def test_a_moved_seam_turns_replay_off(messages, monkeypatch):
    from vllm_ascend.attention.dsa_v41 import AscendDSAV41Impl

    real = AscendDSAV41Impl._get_layer_metadata
    monkeypatch.setattr(seams, "SEAMS", (("vllm_ascend.attention.dsa_v41", "AscendDSAV41Impl._moved", ()),))
    forget_classes()
    s = make_session()
    forget_classes()
    assert AscendDSAV41Impl._get_layer_metadata is real
    assert off_messages(messages) == [
        "decoder replay is off: this vllm-ascend has no vllm_ascend.attention.dsa_v41.AscendDSAV41Impl._moved"
    ]
    assert type(s.rank.model).__name__ == "AscendDeepseekV41ForCausalLM"
    assert_as_without(s)


def test_a_missing_registration_function_is_named(messages, monkeypatch):
    import vllm_ascend.models as ascend_models

    without_package()
    monkeypatch.delattr(ascend_models, "register_model")
    with settings():
        plugin.register()
    assert off_messages(messages) == ["decoder replay is off: vllm_ascend.models has no register_model"]


def test_stands_down_before_a_decoder_replay_of_the_models_own(messages, monkeypatch):
    from vllm_ascend.models.deepseek_v41.engram.model_state import EngramModelState

    monkeypatch.setattr(EngramModelState, "prepare_decoder_replay", lambda self: None, raising=False)
    s = make_session()
    assert off_messages(messages) == [
        "decoder replay is off: the model has a decoder replay of its own (EngramModelState.prepare_decoder_replay)"
    ]
    assert type(s.rank.state) is EngramModelState
    assert type(s.rank.text.layers) is torch.nn.ModuleList
    assert_as_without(s)


def test_names_and_parameters_are_the_parents():
    with_replay, plain = make_session(), make_session(replay=False)
    names = [n for n, _ in with_replay.rank.model.named_parameters()]
    assert names == [n for n, _ in plain.rank.model.named_parameters()]
    assert support.is_untouched()


def test_the_scheduler_seam_is_where_it_was():
    """The one patch of vLLM: if these move, the cap must be looked at again."""
    import inspect

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    assert "kv_cache_manager.get_computed_blocks(request)" in inspect.getsource(Scheduler)
    source = inspect.getsource(KVCacheManager.get_computed_blocks)
    assert "self.coordinator.find_longest_cache_hit(" in source
    assert list(inspect.signature(BlockPool.get_cached_block).parameters) == [
        "self",
        "block_hash",
        "kv_cache_group_ids",
    ]
    assert list(inspect.signature(BlockPool.cache_full_blocks).parameters)[:7] == [
        "self",
        "request",
        "blocks",
        "num_cached_blocks",
        "num_full_blocks",
        "block_size",
        "kv_cache_group_id",
    ]
    assert hasattr(KVCacheCoordinator, "get_replay_boundaries")
