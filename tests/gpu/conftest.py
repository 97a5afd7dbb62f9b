"""These tests need an NVIDIA GPU and vLLM's Python code; ``make test-gpu`` runs them on such a machine."""

from __future__ import annotations

import pytest
import torch

from vllm_ascend_replay.reference.engine import prepare_environment


def pytest_collection_modifyitems(items):
    here = [item for item in items if "/gpu/" in str(item.path)]
    reason = "needs an NVIDIA GPU: run make gpu-bundle here, then make test-gpu there"
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def environment():
    """The process's environment is an engine's while a module runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in prepare_environment({}).items():
            patch.setenv(name, value)
        yield patch
