"""Engram before the cut, on: the n-gram rows are the whole step's and replay does not touch them."""

import pytest

from tests.ascend.support import make_session
from tests.npu_emulator.checks import TIE, report
from tests.npu_emulator.session import tokens
from tests.npu_emulator.tiny import ENGRAM


@pytest.fixture
def identity_map(monkeypatch):
    """No tokenizer here: every token keeps its id."""
    import transformers
    import vllm.models.deepseek_v41.common.engram as upstream

    monkeypatch.setenv("VLLM_PLE_CPU_OFFLOAD", "0")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: None)
    monkeypatch.setattr(upstream, "build_compressed_token_map", lambda tokenizer: (list(range(256)), 256))


@pytest.mark.usefixtures("identity_map")
def test_engram():
    s = make_session(**ENGRAM)
    assert s.rank.text.has_engram
    assert s.rank.text.replay_tail is not None
    s.run({"a": tokens(300, 1), "b": tokens(90, 2)}, 150, max_tokens=4, arrivals={"b": 1})
    for name in "ab":
        r = report(s, name)
        assert not r.nan
        assert r.zero
        assert r.bounded <= TIE, (name, r)
    assert any(0 <= x.kept < x.rows for x in s.steps)
