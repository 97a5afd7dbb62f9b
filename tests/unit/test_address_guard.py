"""Whatever moves, `AddressGuard` finds it: all weights natively, or in turn."""

import copy
import ctypes
import gc
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_ascend_replay import address_guard
from vllm_ascend_replay.address_guard import AddressGuard, NativeWeights, WeightsInTurn, native_first_moved

COUNT = 20
"""Weights of a layer."""
LISTENERS = (
    torch.nn.modules.module._global_buffer_registration_hooks,
    torch.nn.modules.module._global_parameter_registration_hooks,
    torch.nn.modules.module._global_module_registration_hooks,
)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        for i in range(COUNT - 4):
            self.inner.register_parameter(f"w{i}", nn.Parameter(torch.ones(4)))
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("later", None)
        self.register_buffer("empty", torch.ones(0))
        self.register_buffer("sparse", torch.ones(4).to_sparse())
        # As vllm-ascend keeps scales and lists of experts.
        self.scale = torch.ones(2)
        self.experts = [torch.ones(2), torch.ones(2)]
        self.sizes = [1, 2]
        self.scratch = torch.ones(5)
        self.kv_cache = torch.ones(5)


def rows():
    return SimpleNamespace(positions=torch.ones(2), is_padding=torch.ones(2))


# What moves a weight, and its name.


def replace(layer):
    layer.inner.w7 = nn.Parameter(torch.ones(4))
    return "inner.w7"


def swap_buffer(layer):
    layer.table = torch.zeros(3)
    return "table"


def set_to_none(layer):
    layer.inner.w6 = None
    return "inner.w6"


def set_without_storage(layer):
    layer.inner.w6 = nn.Parameter(torch.ones(4).to_sparse())
    return "inner.w6"


def swap_submodule(layer):
    layer.inner = copy.deepcopy(layer.inner)
    return "inner.w0"


def delete(layer):
    del layer.inner.w5
    return "inner.w5"


def swap_memory(layer):
    layer.inner.w3.data = torch.ones(4)
    return "inner.w3"


def set_storage(layer):
    with torch.no_grad():
        layer.inner.w4.set_(torch.ones(4))
    return "inner.w4"


def replace_in_the_dict(layer):
    layer.inner._parameters["w15"] = nn.Parameter(torch.ones(4))
    return "inner.w15"


def not_a_tensor(layer):
    layer.inner._parameters["w6"] = "a string"
    return "inner.w6"


def replace_attribute(layer):
    layer.scale = torch.ones(2)
    return "scale"


def replace_in_the_list(layer):
    layer.experts[1] = torch.ones(2)
    return "experts[1]"


def shorten_the_list(layer):
    del layer.experts[1]
    return "experts[1]"


def replace_the_list(layer):
    layer.experts = list(layer.experts)
    return "experts"


# The next check finds these in turn, too: a module was told, or they are few.
TOLD = [replace, swap_buffer, set_without_storage, swap_submodule, replace_the_list]
SILENT = [
    delete,
    set_to_none,
    swap_memory,
    set_storage,
    replace_in_the_dict,
    not_a_tensor,
    replace_attribute,
    replace_in_the_list,
    shorten_the_list,
]


@pytest.fixture
def kept():
    return rows()


@pytest.fixture
def in_turn(monkeypatch):
    monkeypatch.setattr(address_guard, "native_first_moved", lambda: None)
    monkeypatch.setattr(WeightsInTurn, "PER_CHECK", 1)


@pytest.fixture(params=["native", "in turn"])
def either_way(request):
    if request.param == "in turn":
        request.getfixturevalue("in_turn")


def make_guard(layers, kept, watched=None):
    """A guard of two layers; the scratch changes while they are captured."""
    modules = {"a function": lambda: None, **{f"layers.{i}": layer for i, layer in enumerate(layers)}}
    guard = AddressGuard(watched or {}, modules)
    for layer in layers:
        layer.scratch = torch.ones(5)
    guard.settle()
    addresses = guard.snapshot(kept)
    for layer in layers:
        layer.scratch = torch.ones(5)
    for _ in range(3 * COUNT * len(layers)):
        assert guard.moved(kept, addresses) is None
    return guard, addresses


@pytest.mark.parametrize("at", [0, 1], ids=["first layer", "last layer"])
@pytest.mark.parametrize("move", [*TOLD, *SILENT])
def test_natively_the_next_check_finds_it(kept, move, at):
    layers = [Layer(), Layer()]
    guard, addresses = make_guard(layers, kept)
    assert isinstance(guard.weights, NativeWeights)
    # And the lists themselves.
    assert len(guard.weights.names) == 2 * (COUNT + 1)
    name = f"layers.{at}.{move(layers[at])}"
    for _ in range(2):
        assert guard.moved(kept, addresses) == name


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize("at", [0, 1], ids=["first layer", "last layer"])
@pytest.mark.parametrize("move", TOLD)
def test_in_turn_the_next_check_finds_what_was_told(kept, move, at):
    layers = [Layer(), Layer()]
    guard, addresses = make_guard(layers, kept)
    assert isinstance(guard.weights, WeightsInTurn)
    assert guard.moved(kept, addresses) is None
    name = f"layers.{at}.{move(layers[at])}"
    for _ in range(2):
        assert guard.moved(kept, addresses) == name


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize("move", SILENT)
def test_in_turn_a_silent_move_is_found_when_it_has_its_turn(kept, move):
    """Whenever it happens, also after many rounds; and then by every check, whoever has a turn."""
    layers = [Layer(), Layer()]
    guard, addresses = make_guard(layers, kept)
    for _ in range(7):
        assert guard.moved(kept, addresses) is None
    name = f"layers.1.{move(layers[1])}"
    found = [guard.moved(kept, addresses) for _ in range(4 * COUNT)]
    first = found.index(name)
    assert first < 2 * COUNT
    assert set(found[:first]) <= {None}
    assert set(found[first:]) == {name}


@pytest.mark.usefixtures("either_way")
def test_setting_the_same_tensor_is_no_move(kept):
    layer = Layer()
    guard, addresses = make_guard([layer], kept)
    layer.inner.w2 = layer.inner.w2
    layer.inner = layer.inner
    layer.table = layer.table
    layer.new = torch.ones(3)
    layer.kv_cache = torch.ones(5)
    layer.added = nn.Linear(2, 2)
    for _ in range(2 * COUNT):
        assert guard.moved(kept, addresses) is None


@pytest.mark.usefixtures("either_way")
def test_nothing_is_kept_alive(kept):
    """The memory of a replaced weight is free at once, that of a replaced module at the next check."""
    layer = Layer()
    guard, addresses = make_guard([layer], kept)
    old = weakref.ref(layer.inner.w7)
    replace(layer)
    gc.collect()
    assert old() is None
    layer = Layer()
    guard, addresses = make_guard([layer], kept)
    old = weakref.ref(layer.inner.w7)
    swap_submodule(layer)
    assert guard.moved(kept, addresses)
    gc.collect()
    assert old() is None


@pytest.mark.usefixtures("either_way")
def test_a_guard_that_is_gone_listens_no_longer(kept):
    gc.collect()
    before = [len(listeners) for listeners in LISTENERS]
    guard, _ = make_guard([Layer()], kept)
    assert sum(map(len, LISTENERS)) > sum(before)
    del guard
    gc.collect()
    assert [len(listeners) for listeners in LISTENERS] == before


def test_a_same_address_of_another_type_is_a_move(kept):
    """Only what is a tensor for certain is asked for its address."""
    layer = Layer()
    guard, addresses = make_guard([layer], kept)

    class Other(torch.Tensor):
        pass

    layer.inner._parameters["w3"] = layer.inner.w3.data.as_subclass(Other)
    assert guard.moved(kept, addresses) == "layers.0.inner.w3"


def test_inputs_and_watched_tensors(kept):
    workspace = [torch.ones(3)]
    guard, addresses = make_guard([Layer()], kept, {"a workspace": lambda: workspace[0]})
    for field, name in (("positions", "positions"), ("is_padding", "padding mask")):
        moved = rows()
        setattr(kept, field, getattr(moved, field))
        assert guard.moved(kept, addresses) == name
        kept = rows()
        addresses = guard.snapshot(kept)
    workspace[0] = torch.ones(3)
    assert guard.moved(kept, addresses) == "a workspace"


# -- the build ------------------------------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch):
    """What was logged; nothing is built yet, and what this test builds is forgotten."""
    words = []
    monkeypatch.setattr(address_guard.logger, "info", lambda text, *values: words.append(text % values))
    native_first_moved.cache_clear()
    yield words
    native_first_moved.cache_clear()


@pytest.mark.parametrize(
    "trouble",
    [
        "no compiler",
        "no such compiler",
        "a compiler that fails",
        "no function in PyTorch",
        "another function in PyTorch",
    ],
)
def test_what_cannot_be_built_takes_turns(kept, monkeypatch, said, trouble):
    if trouble == "no compiler":
        monkeypatch.setenv("CXX", "")
        monkeypatch.setenv("PATH", "")
        expected = "no C++ compiler"
    elif trouble == "no such compiler":
        monkeypatch.setenv("CXX", "/nowhere/c++ -O3")
        expected = "/nowhere/c++"
    elif trouble == "a compiler that fails":
        monkeypatch.setenv("CXX", "false")
        expected = "false exited with 1"
    elif trouble == "no function in PyTorch":
        monkeypatch.delattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr")
        expected = "_torchinductor_pyobject_tensor_data_ptr"
    else:
        # A function that gives the object's own address.
        identity = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda pointer: pointer)
        address = ctypes.cast(identity, ctypes.c_void_p).value
        monkeypatch.setattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr", address)
        expected = "other addresses"
    guard, _ = make_guard([Layer()], kept)
    assert isinstance(guard.weights, WeightsInTurn)
    assert len(said) == 1
    assert expected in said[0]


def test_a_compiler_may_have_arguments(kept, monkeypatch, said):
    monkeypatch.setenv("CXX", "env c++ -Wall")
    guard, _ = make_guard([Layer()], kept)
    assert isinstance(guard.weights, NativeWeights)
    assert not said


def test_a_compiler_that_hangs_is_ended_with_what_it_started(kept, monkeypatch, said, tmp_path):
    script, child = tmp_path / "c++", tmp_path / "child"
    # It waits for input first, which must not be the server's.
    script.write_text(f"#!/bin/sh\ncat\nsleep 600 &\necho $! > {child}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(address_guard, "_BUILD_SECONDS", 2)
    guard, _ = make_guard([Layer()], kept)
    assert isinstance(guard.weights, WeightsInTurn)
    assert "timed out" in said[0]
    pid = child.read_text().strip()
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.1)
    pytest.fail("what the compiler started is still there")
