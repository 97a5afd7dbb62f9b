"""A DeepSeek-V4.1-shaped model in plain PyTorch, and its host: decoder replay through vLLM's real engine anywhere."""

from __future__ import annotations

ARCHITECTURE = "ReplayReferenceForCausalLM"


def register() -> None:
    """Register the model's configuration and class with transformers and vLLM; may be called any number of times."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    from vllm_ascend_replay.reference.config import ReferenceConfig

    AutoConfig.register(ReferenceConfig.model_type, ReferenceConfig, exist_ok=True)
    # By name: importing the model class here would initialise devices in processes that only read configurations.
    ModelRegistry.register_model(ARCHITECTURE, "vllm_ascend_replay.reference.model:ReplayReferenceForCausalLM")
    if current_platform.is_cpu():
        _avoid_interpreted_sampler()


def _avoid_interpreted_sampler() -> None:
    """Make vLLM sample top-k/top-p with PyTorch.

    On a CPU Triton kernels run in Triton's interpreter, where a ``range`` variable is a Python int; vLLM's top-k/top-p
    kernel calls tensor methods on one and fails. Its PyTorch path is right and, on a CPU, faster.
    """
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    sampler.HAS_TRITON = False
