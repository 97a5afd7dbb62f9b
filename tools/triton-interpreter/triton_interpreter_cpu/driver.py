"""The driver half of the backend: one device, one stream, the host's clock."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from triton_interpreter_cpu import cpu_only


class InterpreterDriver(DriverBase):
    """Stands where a GPU's driver would: Triton wants exactly one active driver."""

    @classmethod
    def is_active(cls) -> bool:
        return cpu_only()

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", "interpreter", 1)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def benchmark(
            kernel: Callable[[], Any], *, quantiles: Sequence[float] = (0.5, 0.2, 0.8), **_: Any
        ) -> list[float]:
            """One timed call in milliseconds, repeated for every quantile: autotuning has nothing to choose here."""
            start = time.perf_counter()
            kernel()
            return [(time.perf_counter() - start) * 1e3] * len(quantiles)

        return benchmark
