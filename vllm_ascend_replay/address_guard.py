"""`AddressGuard`: are the tensors of the replay graphs still where the graphs read them?"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from vllm.logger import init_logger

from vllm_ascend_replay.batch import KeptRows

logger = init_logger("vllm.vllm_ascend_replay")

_NATIVE = "address_guard_native"
_BUILD_SECONDS = 60


class AddressGuard:
    """Finds a tensor that is no longer where the graphs read it.

    Every check looks at the inputs, at the watched tensors, which somebody else owns, and at all weights of the layers
    (`NativeWeights`, or `WeightsInTurn` where that cannot be built).
    """

    INPUTS = ("positions", "padding mask")

    def __init__(self, watched: Mapping[str, Callable[[], torch.Tensor]], modules: Mapping[str, Any]) -> None:
        """
        Args:
            watched: getters of tensors by name.
            modules: by name; parameters and buffers of those that are modules are watched too.
        """
        self.names, self._getters = list(watched), list(watched.values())
        layers = {prefix: module for prefix, module in modules.items() if isinstance(module, nn.Module)}
        first_moved = native_first_moved()
        self.weights = WeightsInTurn(layers) if first_moved is None else NativeWeights(layers, first_moved)

    def snapshot(self, kept: KeptRows) -> list[int]:
        """Where the inputs, which the rows bring along, and the watched tensors are now."""
        return [kept.positions.data_ptr(), kept.is_padding.data_ptr(), *[get().data_ptr() for get in self._getters]]

    def moved(self, kept: KeptRows, addresses: list[int]) -> str | None:
        """The name of a tensor that has moved since ``addresses`` was taken, or ``None``."""
        now = self.snapshot(kept)
        if now != addresses:
            return next(name for name, a, b in zip((*self.INPUTS, *self.names), now, addresses) if a != b)
        return self.weights.moved()


class Weights:
    """Parameters and buffers of layers, looked up where their owners keep them: a replaced one has moved as well."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        places = {
            f"{prefix}.{name}.{key}".replace("..", "."): (store, key)
            for prefix, layer in layers.items()
            for name, owner in layer.named_modules()
            for store in (owner._parameters, owner._buffers)
            for key, tensor in store.items()
            if tensor is not None and tensor.numel()
        }
        self.names = list(places)
        self._stores = tuple(store for store, _ in places.values())
        self._keys = tuple(key for _, key in places.values())

    def moved(self) -> str | None:
        """The name of a weight that has moved, or ``None``."""
        raise NotImplementedError


class NativeWeights(Weights):
    """All weights in every check."""

    def __init__(self, layers: Mapping[str, nn.Module], first_moved: Callable[..., int]) -> None:
        super().__init__(layers)
        tensors = [store[key] for store, key in zip(self._stores, self._keys)]
        addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64).tobytes()
        # The tensors themselves are not held: memory of one that is replaced must be free to go.
        types = tuple(type(tensor) for tensor in tensors)
        self._first_moved = functools.partial(
            first_moved, self._stores, self._keys, types, addresses, _address_function()
        )

    def moved(self) -> str | None:
        first = self._first_moved()
        return None if first == len(self.names) else self.names[first]


class WeightsInTurn(Weights):
    """A few weights in every check, where all would take too long: without the native loop.

    Modules tell when a parameter or buffer is set, so one that is replaced is found by the next check; one whose memory
    is exchanged under it (``weight.data = ...``) tells nobody and is found when it has its turn.
    """

    PER_CHECK = 128

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(layers)
        self._addresses = self._now(0, len(self.names))
        self._next = 0
        self._replaced = False
        """A weight was set: look at all of them."""
        owners = {id(owner) for layer in layers.values() for owner in layer.modules()}
        this = weakref.ref(self)

        def tell(module: nn.Module, name: str, value: Any) -> None:
            weights = this()
            if weights is not None and id(module) in owners:
                weights._replaced = True

        for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
            weakref.finalize(self, register(tell).remove)

    def moved(self) -> str | None:
        if self._replaced:
            begin, end = 0, len(self.names)
        else:
            begin = self._next
            end = min(begin + self.PER_CHECK, len(self.names))
            self._next = 0 if end == len(self.names) else end
        now, then = self._now(begin, end), self._addresses[begin:end]
        if now != then:
            return next(name for name, a, b in zip(self.names[begin:end], now, then) if a != b)
        self._replaced = False
        return None

    def _now(self, begin: int, end: int) -> list[int]:
        stores, keys = self._stores[begin:end], self._keys[begin:end]
        try:
            return list(map(torch.Tensor.data_ptr, map(dict.__getitem__, stores, keys)))
        except (KeyError, TypeError, RuntimeError):
            # One is gone, or has no storage.
            return [_address(store.get(key)) for store, key in zip(stores, keys)]


def _address(tensor: torch.Tensor | None) -> int:
    try:
        return 0 if tensor is None else tensor.data_ptr()
    except RuntimeError:
        return 0


def _address_function() -> int:
    """PyTorch's function from a tensor's Python object to its address, which its own compiler's code calls."""
    from torch._C._dynamo import guards

    return int(guards._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]


@functools.cache
def native_first_moved() -> Callable[..., int] | None:
    """``first_moved`` of ``address_guard.cpp``, built in a second, once a process; ``None`` where that fails.

    What it takes is what Triton takes to launch kernels: a compiler and Python's headers.
    """
    try:
        _address_function()
        first_moved = _build(Path(__file__).with_suffix(".cpp"))
        _try_out(first_moved)
        return first_moved
    except Exception as error:  # whatever it is, the graphs can do without
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
        logger.info(
            "decoder replay checks %d weights in each replay of a graph, in turn, not all of them: the faster check "
            "could not be built (%s) %s",
            WeightsInTurn.PER_CHECK,
            error,
            said.decode(errors="replace")[-500:],
        )
        return None


def _build(source: Path) -> Callable[..., int]:
    found = (shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name)
    compiler = next((path for path in found if path), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler; set CXX or install g++")
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / f"{_NATIVE}{sysconfig.get_config_var('EXT_SUFFIX')}"
        include = sysconfig.get_path("include")
        command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_SECONDS)
        spec = importlib.util.spec_from_file_location(_NATIVE, library)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.first_moved  # type: ignore[no-any-return]


def _try_out(first_moved: Callable[..., int]) -> None:
    """That PyTorch's function is what it was when this was written."""
    layer = nn.Module()
    layer.a, layer.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    weights = NativeWeights({"": layer}, first_moved)
    unmoved = weights.moved()
    layer.b.data = torch.ones(3)
    if (unmoved, weights.moved()) != (None, ".b"):
        raise RuntimeError("PyTorch gives out other addresses than its tensors do")
