"""Decoder-side sliding-window bounded replay for DeepSeek-V4.1 on Ascend NPUs (vLLM + vllm-ascend)."""

__version__ = "0.1.0"
