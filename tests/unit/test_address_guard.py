"""Whatever moves, `AddressGuard` finds it: all weights natively, or in turn."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_ascend_replay import address_guard
from vllm_ascend_replay.address_guard import AddressGuard, NativeWeights, WeightsInTurn, native_first_moved

COUNT = 20


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        for i in range(COUNT - 1):
            self.inner.register_parameter(f"w{i}", nn.Parameter(torch.ones(4)))
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("later", None)
        self.register_buffer("empty", torch.ones(0))


def rows():
    return SimpleNamespace(positions=torch.ones(2), is_padding=torch.ones(2))


def replace(layer):
    layer.inner.w7 = nn.Parameter(torch.ones(4))
    return "layer.inner.w7"


def replace_in_the_dict(layer):
    layer.inner._parameters["w18"] = nn.Parameter(torch.ones(4))
    return "layer.inner.w18"


def swap_memory(layer):
    layer.inner.w3.data = torch.ones(4)
    return "layer.inner.w3"


def set_storage(layer):
    layer.inner.w4.detach().set_(torch.ones(4))
    with torch.no_grad():
        layer.inner.w4.set_(torch.ones(4))
    return "layer.inner.w4"


def swap_buffer(layer):
    layer.table = torch.zeros(3)
    return "layer.table"


def delete(layer):
    del layer.inner.w5
    return "layer.inner.w5"


def none(layer):
    layer.inner.w6 = None
    return "layer.inner.w6"


def no_tensor(layer):
    layer.inner._parameters["w6"] = "a string"
    return "layer.inner.w6"


def no_storage(layer):
    layer.inner.w6 = nn.Parameter(torch.ones(4).to_sparse())
    return "layer.inner.w6"


SILENT = [swap_memory, set_storage, replace_in_the_dict]
LOUD = [replace, swap_buffer, delete, none, no_storage]


@pytest.fixture
def kept():
    return rows()


def make_guard(layer, kept, watched=None):
    guard = AddressGuard(watched or {}, {"layer": layer, "a function": lambda: None})
    addresses = guard.snapshot(kept)
    assert guard.moved(kept, addresses) is None
    return guard, addresses


@pytest.fixture
def in_turn(monkeypatch):
    monkeypatch.setattr(address_guard, "native_first_moved", lambda: None)
    monkeypatch.setattr(WeightsInTurn, "PER_CHECK", 1)


@pytest.mark.parametrize("move", [*SILENT, *LOUD, no_tensor])
def test_natively_the_next_check_finds_it(kept, move):
    layer = Layer()
    guard, addresses = make_guard(layer, kept)
    assert isinstance(guard.weights, NativeWeights)
    assert len(guard.weights.names) == COUNT
    name = move(layer)
    for _ in range(2):
        assert guard.moved(kept, addresses) == name


def test_natively_nothing_is_kept_alive(kept):
    """The memory of a replaced weight is free as soon as its owner lets go of it."""
    layer = Layer()
    _guard, _ = make_guard(layer, kept)
    old = weakref.ref(layer.inner.w7)
    replace(layer)
    gc.collect()
    assert old() is None


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize("move", LOUD)
def test_in_turn_the_next_check_finds_what_was_set(kept, move):
    layer = Layer()
    guard, addresses = make_guard(layer, kept)
    name = move(layer)
    if move in (delete, none):
        # Nobody tells.
        assert name in [guard.moved(kept, addresses) for _ in range(COUNT)]
    else:
        assert guard.moved(kept, addresses) == name


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize("move", SILENT)
def test_in_turn_a_silent_move_is_found_when_it_has_its_turn(kept, move):
    layer = Layer()
    guard, addresses = make_guard(layer, kept)
    name = move(layer)
    turn = guard.weights.names.index(name)
    found = [guard.moved(kept, addresses) for _ in range(COUNT)]
    # One weight had its turn when the guard was made.
    assert found.index(name) == (turn - 1) % COUNT


@pytest.mark.usefixtures("in_turn")
def test_in_turn_setting_the_same_tensor_is_no_move(kept):
    layer = Layer()
    guard, addresses = make_guard(layer, kept)
    layer.inner.w2 = layer.inner.w2
    assert guard.weights._replaced
    assert guard.moved(kept, addresses) is None
    assert not guard.weights._replaced


@pytest.mark.usefixtures("in_turn")
def test_a_guard_that_is_gone_listens_no_longer(kept):
    listeners = torch.nn.modules.module._global_buffer_registration_hooks
    before = len(listeners)
    guard, _ = make_guard(Layer(), kept)
    assert len(listeners) == before + 1
    del guard
    gc.collect()
    assert len(listeners) == before


def test_inputs_and_watched_tensors(kept):
    workspace = [torch.ones(3)]
    guard, addresses = make_guard(Layer(), kept, {"a workspace": lambda: workspace[0]})
    for field, name in (("positions", "positions"), ("is_padding", "padding mask")):
        moved = rows()
        setattr(kept, field, getattr(moved, field))
        assert guard.moved(kept, addresses) == name
        kept = rows()
        addresses = guard.snapshot(kept)
    workspace[0] = torch.ones(3)
    assert guard.moved(kept, addresses) == "a workspace"


@pytest.mark.parametrize(
    "trouble", ["no compiler", "a compiler that fails", "no function in PyTorch", "another function in PyTorch"]
)
def test_what_cannot_be_built_takes_turns(kept, monkeypatch, trouble):
    said = []
    monkeypatch.setattr(address_guard.logger, "info", lambda words, *values: said.append(words % values))
    if trouble == "no compiler":
        monkeypatch.setenv("CXX", "nowhere")
        monkeypatch.setenv("PATH", "")
        expected = "no C++ compiler"
    elif trouble == "a compiler that fails":
        monkeypatch.setenv("CXX", "false")
        expected = "returned non-zero exit status 1"
    elif trouble == "no function in PyTorch":
        monkeypatch.delattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr")
        expected = "_torchinductor_pyobject_tensor_data_ptr"
    else:
        # A function that gives the object's own address.
        import ctypes

        identity = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda pointer: pointer)
        address = ctypes.cast(identity, ctypes.c_void_p).value
        monkeypatch.setattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr", address)
        expected = "other addresses"
    native_first_moved.cache_clear()
    try:
        guard, _ = make_guard(Layer(), kept)
    finally:
        native_first_moved.cache_clear()
    assert isinstance(guard.weights, WeightsInTurn)
    assert len(said) == 1
    assert expected in said[0]
