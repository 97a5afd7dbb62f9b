"""These tests run the released vllm-ascend on emulated operators: one process per NPU_EMU_DEVICE (A2, A5)."""

from importlib.util import find_spec

import pytest

if find_spec("vllm_ascend") is None:
    pytest.skip("vllm-ascend is not installed here; use make test-ascend", allow_module_level=True)

from tests.npu_emulator import activate

activate()

from tests.ascend import support  # noqa: E402

support.remember_originals()
