"""Triton kernels on the CPU: Triton's own interpreter behind a driver that vLLM accepts.

vLLM uses Triton only when exactly one backend has an active driver; vllm-ascend asks the driver for core counts.
"""

import os
import types

import torch

os.environ.setdefault("TRITON_INTERPRET", "1")

import triton.backends
from triton.runtime import driver as _triton_driver


class CpuDriver:
    """A driver with two AI cores and four vector cores, the smallest machine a grid is split over."""

    utils = types.SimpleNamespace(
        get_device_properties=lambda *a: {"num_aicore": 2, "num_vectorcore": 4, "multiprocessor_count": 2}
    )

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return types.SimpleNamespace(backend="npu", arch="Ascend910B", warp_size=0)

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def _boolean_masks() -> None:
    """Lets masks that "&" turned into integers pass; the interpreter refuses them, compilers do not."""
    from triton.runtime.interpreter import InterpreterBuilder

    def accept(name, position):
        real = getattr(InterpreterBuilder, name)

        def call(self, *args):
            if args[position].data.dtype != bool:
                args[position].data = args[position].data.astype(bool)
            return real(self, *args)

        setattr(InterpreterBuilder, name, call)

    accept("create_masked_load", 1)
    accept("create_masked_store", 2)


triton.backends.backends.clear()
triton.backends.backends["cpu"] = types.SimpleNamespace(driver=CpuDriver)
_triton_driver.set_active(CpuDriver())
_boolean_masks()
