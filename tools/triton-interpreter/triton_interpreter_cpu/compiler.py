"""The compiler half of the backend: it names the target and refuses to compile."""

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    """Compiles nothing. Reaching it means a kernel was defined with ``TRITON_INTERPRET`` off."""

    binary_ext = "none"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreter-cpu"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        self._refuse()

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> NoReturn:
        self._refuse()

    def load_dialects(self, context: Any) -> None:
        return None

    def get_module_map(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def _refuse() -> NoReturn:
        raise RuntimeError("the cpu backend only interprets kernels: set TRITON_INTERPRET=1 before importing triton")
