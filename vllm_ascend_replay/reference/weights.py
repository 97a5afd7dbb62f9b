"""Weights that are generated, not loaded."""

from __future__ import annotations

import zlib

import torch
from torch import nn
from torch.nn import functional

from vllm_ascend_replay.reference import fused


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, softmax, routing and hyper-connection maths for a model in ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class SeededWeights(nn.Module):
    """A module whose weights are functions of a seed and their name.

    They are non-persistent buffers: vLLM's dummy loader overwrites what is in the state dict and leaves these alone.
    Every rank generates the same values, on its own device, so that wide models start quickly.
    """

    def __init__(self, *, name: str, seed: int, dtype: torch.dtype) -> None:
        """
        Args:
            name: what makes this module's weights differ from another module's.
            seed: the model's seed.
            dtype: the dtype of weights unless `weight` is told another.
        """
        super().__init__()
        self.dtype = dtype
        self.weight_names: list[str] = []
        self._name, self._seed = name, seed

    def weight(
        self, name: str, *shape: int, scale: float | None = None, mean: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        """Register normal random values as attribute ``name``.

        Args:
            shape: the weight's shape; a matrix ``[..., out, in]`` is applied as ``x @ weight.T``.
            scale: standard deviation; default ``1 / sqrt(in)``.
            mean: of the values.
            dtype: default the module's.
        """
        device = torch.get_default_device()
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{self._seed}.{self._name}.{name}".encode()))
        # Always drawn in float32, so that models in different dtypes hold the same values up to rounding.
        values = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
        values = values.mul_(shape[-1] ** -0.5 if scale is None else scale).add_(mean).to(dtype or self.dtype)
        self.register_buffer(name, values, persistent=False)
        self.weight_names.append(name)


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All generated weights under ``model`` by dotted name."""
    return {
        f"{prefix}.{name}".lstrip("."): getattr(module, name)
        for prefix, module in model.named_modules()
        if isinstance(module, SeededWeights)
        for name in module.weight_names
    }


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, ``[..., d]``, in the accumulation dtype."""
    if x.ndim == 2 and fused.takes(x):
        return fused.rms_norm(x, weight, eps)
    wide = x.to(accumulation_dtype(x.dtype))
    return functional.rms_norm(wide, weight.shape, weight, eps).to(x.dtype)
