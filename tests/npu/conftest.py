"""These tests need an Ascend NPU: ``make test-npu`` on the server, or the NPU job of the CI."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch


def npu_is_here() -> bool:
    if find_spec("torch_npu") is None:
        return False
    import torch_npu  # noqa: F401

    return bool(torch.npu.is_available())


def pytest_collection_modifyitems(items):
    here = [item for item in items if "/tests/npu/" in str(item.path)]
    found = npu_is_here()
    for item in here:
        item.add_marker(pytest.mark.npu)
        if not found and not item.get_closest_marker("anywhere"):
            item.add_marker(pytest.mark.skip(reason="needs an Ascend NPU: make test-npu on the server"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("npu")
