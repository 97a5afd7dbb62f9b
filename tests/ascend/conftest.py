"""These tests run the released vllm-ascend on emulated operators: one process per NPU_EMU_DEVICE (A2, A5)."""

import os
from importlib.util import find_spec

import pytest

if find_spec("vllm_ascend") is None:
    pytest.skip("vllm-ascend is not installed here; use make test-ascend", allow_module_level=True)

from tests.npu_emulator import ON_A5, activate, freeze_imports

# vLLM settles it when it is imported; without it there are no replay graphs to test.
os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
activate()

from tests.ascend import support  # noqa: E402

support.remember_originals()
freeze_imports()

# What has nothing to do with the hardware profile is tested on one of them; on the other it is slow.
ONLY_ON = {
    "A2": {"test_emulated_graphs", "test_engine", "test_gates", "test_graphs", "test_prefix"},
    "A5": {"test_doctor", "test_dspark", "test_engine_drafts", "test_engram", "test_ranks"},
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    others = ONLY_ON["A2" if ON_A5 else "A5"]
    for item in items:
        if item.path.stem in others:
            item.add_marker(pytest.mark.slow)
