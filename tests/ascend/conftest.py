"""These tests run the released vllm-ascend on emulated operators: one process per NPU_EMU_DEVICE (A2, A5)."""

import os
from importlib.util import find_spec

import pytest

if find_spec("vllm_ascend") is None:
    pytest.skip("vllm-ascend is not installed here; use make test-ascend", allow_module_level=True)

from tests.npu_emulator import activate

# vLLM settles it when it is imported; without it there are no replay graphs to test.
os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
activate()

from tests.ascend import support  # noqa: E402

support.remember_originals()
