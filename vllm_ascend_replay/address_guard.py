"""`AddressGuard`: are the tensors of the replay graphs still where the graphs read them?"""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
import shlex
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from vllm.logger import init_logger

from vllm_ascend_replay.batch import KeptRows

logger = init_logger("vllm.vllm_ascend_replay")

_NATIVE = "address_guard_native"
_BUILD_SECONDS = 60


@dataclass(frozen=True)
class Place:
    """Where a layer keeps a tensor, or a list of tensors."""

    container: Any
    """A dict, list or tuple."""
    key: Any
    address: int
    """Of the tensor's memory; of a list or tuple, of the object itself."""
    type: type | None
    """Of the tensor; ``None`` for a list or tuple."""

    def now(self) -> int:
        """``address`` as it is now; 0 if nothing of the kind is there."""
        try:
            found = self.container[self.key]
            return id(found) if self.type is None else _address(found)
        except (KeyError, IndexError):
            return 0


def find_weights(layers: Mapping[str, nn.Module]) -> dict[str, Place]:
    """Places of the layers' parameters and buffers by name."""
    places: dict[str, Place] = {}
    for where, owner in _owners(layers):
        for store in (owner._parameters, owner._buffers):
            for key, tensor in store.items():
                _add(places, f"{where}.{key}", store, key, tensor)
    return places


def find_attributes(layers: Mapping[str, nn.Module]) -> dict[str, Place]:
    """Places of tensors, and of lists of tensors, that are plain attributes of the layers' modules.

    vllm-ascend keeps scales, and under some configurations all expert weights, so.
    """
    places: dict[str, Place] = {}
    for where, owner in _owners(layers):
        for key, value in vars(owner).items():
            if key == "kv_cache":
                continue  # attention's, an eager break; a server may bind another
            _add(places, f"{where}.{key}", vars(owner), key, value)
            if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
                places[f"{where}.{key}"] = Place(vars(owner), key, id(value), None)
                for i, part in enumerate(value):
                    _add(places, f"{where}.{key}[{i}]", value, i, part)
    return places


def _owners(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for prefix, layer in layers.items():
        for inner, owner in layer.named_modules():
            yield f"{prefix}.{inner}" if inner else prefix, owner


def _add(places: dict[str, Place], name: str, container: Any, key: Any, tensor: Any) -> None:
    # A tensor without memory (empty, lazy, sparse) has no address to compare.
    if isinstance(tensor, torch.Tensor) and (address := _address(tensor)):
        places[name] = Place(container, key, address, type(tensor))


def _address(tensor: Any) -> int:
    """0 for what has no memory or is no tensor."""
    try:
        return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else 0
    except (RuntimeError, ValueError):
        return 0


class AddressGuard:
    """Finds a tensor that is no longer where the graphs read it.

    Every check looks at the inputs, at the watched tensors, which somebody else owns, and at all weights of the layers
    (`NativeWeights`, or `WeightsInTurn` where that cannot be built).
    """

    INPUTS = ("positions", "padding mask")

    def __init__(self, watched: Mapping[str, Callable[[], torch.Tensor]], modules: Mapping[str, Any]) -> None:
        """Make it before the captures, and `settle` it after them.

        Args:
            watched: getters of tensors by name.
            modules: by name; the tensors of those that are modules are watched too.
        """
        self.names, self._getters = list(watched), list(watched.values())
        self._layers = {prefix: module for prefix, module in modules.items() if isinstance(module, nn.Module)}
        self._attributes = find_attributes(self._layers)
        self.weights: Weights | None = None

    def snapshot(self, kept: KeptRows) -> list[int]:
        """Where the inputs, which the rows bring along, and the watched tensors are now."""
        return [kept.positions.data_ptr(), kept.is_padding.data_ptr(), *[get().data_ptr() for get in self._getters]]

    def weight_addresses(self) -> dict[str, int]:
        """Where the parameters and buffers are now, by name."""
        return {name: place.address for name, place in find_weights(self._layers).items()}

    def settle(self) -> None:
        """Watch the weights where they are now.

        An attribute that changed during the captures is a layer's scratch, not what a graph reads.
        """
        places = find_weights(self._layers)
        for name, place in find_attributes(self._layers).items():
            before = self._attributes.get(name)
            if before is not None and before.address == place.address:
                places[name] = place
        self._attributes = {}
        first_moved = native_first_moved()
        if first_moved is None:
            self.weights = WeightsInTurn(self._layers, places)
        else:
            self.weights = NativeWeights(self._layers, places, first_moved)

    def moved(self, kept: KeptRows, addresses: list[int]) -> str | None:
        """The name of a tensor that has moved since ``addresses`` was taken, or ``None``."""
        assert self.weights is not None
        now = self.snapshot(kept)
        if now != addresses:
            return next(name for name, a, b in zip((*self.INPUTS, *self.names), now, addresses) if a != b)
        return self.weights.moved()


class Weights:
    """Tensors of layers, looked up where their owners keep them: one that was replaced has moved as well.

    Modules tell when one of their submodules is set; then the places are looked for anew.
    """

    EVENTS: Sequence[Callable[..., Any]] = (register_module_module_registration_hook,)

    def __init__(self, layers: Mapping[str, nn.Module], places: Mapping[str, Place]) -> None:
        self.names = list(places)
        self._places, self._layers = list(places.values()), layers
        self._found: str | None = None
        self._told = False
        """A module was told of a change."""
        owners = {id(owner) for layer in layers.values() for owner in layer.modules()}
        this = weakref.ref(self)

        def tell(module: nn.Module, name: str, value: Any) -> None:
            weights = this()
            if weights is not None and id(module) in owners:
                weights._told = True

        for register in self.EVENTS:
            weakref.finalize(self, register(tell).remove)

    def moved(self) -> str | None:
        """The name of a weight that has moved, or ``None``. What was found once is not looked for again."""
        if self._found is None:
            self._found = self._look_anew() if self._told else self._look()
            self._told = False
            if self._found is not None:
                # Nothing that was replaced is kept alive.
                self._places, self._layers = [], {}
                self._forget()
        return self._found

    def _look(self) -> str | None:
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop what holds containers."""
        raise NotImplementedError

    def _look_anew(self) -> str | None:
        """All of them, and whether their owners are the same."""
        now = find_weights(self._layers) | find_attributes(self._layers)
        for name, place in zip(self.names, self._places):
            found = now.get(name)
            if found is None or found.container is not place.container or found.address != place.address:
                return name
        return None


class NativeWeights(Weights):
    """All weights in every check."""

    def __init__(
        self, layers: Mapping[str, nn.Module], places: Mapping[str, Place], first_moved: Callable[..., int]
    ) -> None:
        super().__init__(layers, places)
        # The tensors themselves are not held: memory of one that is replaced must be free to go.
        self._first_moved: Callable[[], int] | None = functools.partial(
            first_moved,
            tuple(place.container for place in self._places),
            tuple(place.key for place in self._places),
            tuple(place.type for place in self._places),
            np.array([place.address for place in self._places], dtype=np.uint64).tobytes(),
            np.array([_hints(place) for place in self._places], dtype=np.uint64).tobytes(),
            _address_function(),
        )

    def _look(self) -> str | None:
        assert self._first_moved is not None
        first = self._first_moved()
        return None if first == len(self.names) else self.names[first]

    def _forget(self) -> None:
        self._first_moved = None


def _hints(place: Place) -> tuple[int, int, int, int]:
    """What a look at ``place`` reads: the container, the object, PyTorch's tensor and its storage."""
    found = place.container[place.key]
    if place.type is None:
        return id(place.container), id(found), 0, 0
    return id(place.container), id(found), found._cdata, found.untyped_storage()._cdata


class WeightsInTurn(Weights):
    """A few weights in every check, where all would take too long: without the native loop.

    Modules also tell when a parameter or buffer is set, so one that is replaced is found by the next check; one whose
    memory is exchanged under it (``weight.data = ...``) tells nobody and is found when it has its turn.
    """

    PER_CHECK = 128
    EVENTS = (
        *Weights.EVENTS,
        register_module_parameter_registration_hook,
        register_module_buffer_registration_hook,
    )

    def __init__(self, layers: Mapping[str, nn.Module], places: Mapping[str, Place]) -> None:
        tensors = {name: place for name, place in places.items() if place.type is not None}
        # Tensors first: a turn is a slice of them.
        super().__init__(layers, {**tensors, **places})
        self._lists = [(name, place) for name, place in places.items() if place.type is None]
        self._count, self._next = len(tensors), 0
        self._containers = [place.container for place in tensors.values()]
        self._keys = [place.key for place in tensors.values()]
        self._addresses = [place.address for place in tensors.values()]

    def _look(self) -> str | None:
        for name, place in self._lists:
            if place.now() != place.address:
                return name
        begin = self._next
        end = min(begin + self.PER_CHECK, self._count)
        self._next = 0 if end == self._count else end
        try:
            found = map(operator.getitem, self._containers[begin:end], self._keys[begin:end])
            now = list(map(torch.Tensor.data_ptr, found))
        except (LookupError, TypeError, RuntimeError):
            now = [place.now() for place in self._places[begin:end]]
        then = self._addresses[begin:end]
        return None if now == then else next(n for n, a, b in zip(self.names[begin:end], now, then) if a != b)

    def _forget(self) -> None:
        self._lists, self._containers = [], []


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
        logger.info(
            "decoder replay checks %d weights in each replay of a graph, in turn, not all of them: the faster check "
            "could not be built (%s)",
            WeightsInTurn.PER_CHECK,
            error,
        )
        return None


def _build(source: Path) -> Callable[..., int]:
    compiler = _compiler()
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / f"{_NATIVE}{sysconfig.get_config_var('EXT_SUFFIX')}"
        include = sysconfig.get_path("include")
        command = [*compiler, "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library)]
        _run(command)
        spec = importlib.util.spec_from_file_location(_NATIVE, library)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.first_moved  # type: ignore[no-any-return]


def _compiler() -> list[str]:
    """``CXX``, which may have arguments, or one that is found."""
    if words := shlex.split(os.environ.get("CXX", "")):
        return words
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise FileNotFoundError("no C++ compiler; set CXX or install g++")


def _run(command: Sequence[str]) -> None:
    """Run a compiler, whatever it is: it gets no input, and is ended with all that it started."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=_BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        raise RuntimeError(f"{command[0]} exited with {process.returncode}: {said.decode(errors='replace')[-500:]}")


def _try_out(first_moved: Callable[..., int]) -> None:
    """That PyTorch's function is what it was when this was written."""
    layer = nn.Module()
    layer.a, layer.b = nn.Parameter(torch.ones(3, device="cpu")), nn.Parameter(torch.ones(3, device="cpu"))
    weights = NativeWeights({}, find_weights({"layer": layer}), first_moved)
    unmoved = weights.moved()
    layer.b.data = torch.ones(3, device="cpu")
    if (unmoved, weights.moved()) != (None, "layer.b"):
        raise RuntimeError("PyTorch gives out other addresses than its tensors do")
