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


@pytest.fixture(scope="session", autouse=True)
def pool_in_use():
    """A graph in vLLM's pool, which all engines of a process share.

    A server has one engine. Here one follows another, and PyTorch takes no new graph into a pool that once had some.
    """
    if not torch.cuda.is_available():
        yield
        return
    from vllm.platforms import current_platform

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=current_platform.get_global_graph_pool()):
        torch.zeros(1, device="cuda")
    yield
    del graph


@pytest.fixture(scope="module")
def environment():
    """The process's environment is an engine's while a module runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in prepare_environment({}).items():
            patch.setenv(name, value)
        yield patch
