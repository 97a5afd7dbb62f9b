"""Makes vllm-ascend importable on a machine without an NPU and lets its tensors land on the CPU.

Importing this module changes the process: do it before anything of vllm or vllm_ascend is imported. Only what the
import and the Python side of vllm-ascend 0.30.0rc2 touch is stood in for; arithmetic lives in the other modules.

Environment it reads: `NPU_EMU_DEVICE` (A2, A3, A5), `NPU_EMU_DEVICES` (how many devices `torch.npu` reports),
`NPU_EMU_TORCH` ("2.10", the torch of the release: MoE layers are found by a counter in the forward context; anything
else: by name, as newer torch does).
"""

# ruff: noqa: E402 - the order of imports and of what happens between them is the point

import importlib.machinery
import importlib.metadata
import itertools
import os
import sys
import types
from unittest.mock import MagicMock

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.setdefault("VLLM_PLUGINS", "ascend,ascend_model")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
DEVICE = os.environ.get("NPU_EMU_DEVICE", "A2")
OLD_TORCH = os.environ.get("NPU_EMU_TORCH", "2.10") == "2.10"
if OLD_TORCH:
    os.environ["VLLM_USE_LAYERNAME"] = "0"


class MockPackages:
    """Import hook: `torch_npu`, `acl` and so on are packages whose attributes are mocks."""

    roots = ("torch_npu", "acl", "fla_npu", "mooncake")
    prefixes = ("triton.language.extra.cann", "triton.runtime.libentry", "triton.backends.ascend")

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.roots or name.startswith(self.prefixes):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _mock_attributes(spec.name)
        return module

    def exec_module(self, module):
        pass


def _mock_attributes(owner):
    """A module-level `__getattr__` that makes one mock per name and keeps it."""
    made = {}

    def lookup(attr):
        if attr.startswith("__"):
            raise AttributeError(attr)
        return made.setdefault(attr, MagicMock(name=f"{owner}.{attr}"))

    return lookup


sys.meta_path.insert(0, MockPackages())
import torch

from . import graphs, triton_cpu  # noqa: F401

# ---- torch.npu ---------------------------------------------------------------


class Event:
    """Program order is the only order here: nothing to record or to wait for."""

    def __init__(self, *a, **k):
        pass

    def record(self, *a):
        pass

    def wait(self, *a):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class Stream:
    """Everything runs in program order, so streams do nothing."""

    npu_stream = 0

    def __init__(self, *a, **k):
        pass

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *a):
        return False


_pools = itertools.count()
_free_memory = itertools.count(1 << 34, -(1 << 20))


def _memory(*_):
    """(free, total) bytes; free shrinks a little on every look, as memory profiling expects."""
    return next(_free_memory), 1 << 34


_MAIN_STREAM = Stream()
_SOC_VERSION = {"A2": 220, "A3": 250, "A5": 260}


def _make_npu_module():
    npu = types.ModuleType("torch.npu")
    known = {
        "NPUGraph": graphs.Graph,
        "graph": graphs.graph,
        "graph_pool_handle": lambda: ("npu pool", next(_pools)),
        "Stream": Stream,
        "Event": Event,
        "ExternalEvent": Event,
        "current_stream": lambda *a: _MAIN_STREAM,
        "default_stream": lambda *a: _MAIN_STREAM,
        "stream": graphs.stream,
        "set_stream": lambda *a: None,
        "current_device": lambda: 0,
        "set_device": lambda *a: None,
        "is_available": lambda: True,
        "device_count": lambda: int(os.environ.get("NPU_EMU_DEVICES", "8")),
        "get_device_name": lambda *a: "Ascend910B",
        "is_current_stream_capturing": graphs.is_capturing,
        "synchronize": lambda *a: None,
        "empty_cache": lambda: None,
        "mem_get_info": _memory,
        "memory_allocated": lambda *a: 0,
        "max_memory_allocated": lambda *a: 0,
        "memory_reserved": lambda *a: 0,
        "memory_stats": lambda *a: {},
        "reset_peak_memory_stats": lambda *a: None,
        "get_soc_version": lambda: _SOC_VERSION[DEVICE],
        "config": MagicMock(),
    }
    for name, value in known.items():
        setattr(npu, name, value)
    npu.__getattr__ = _mock_attributes("torch.npu")
    return npu


torch.utils.rename_privateuse1_backend("npu")
torch.npu = sys.modules["torch.npu"] = _make_npu_module()
import torch_npu

torch_npu.npu = torch.npu
for _name in ("synchronize", "empty_cache", "set_device_index", "reset_peak_memory_stats"):
    setattr(torch.accelerator, _name, lambda *a, **k: None)
torch._C._get_accelerator = lambda *a: torch.device("cpu")
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.memory_stats = lambda *a: {}
torch.accelerator.max_memory_allocated = torch.accelerator.memory_allocated = lambda *a: 0
torch.accelerator.memory_reserved = lambda *a: 0
torch.accelerator.get_memory_info = _memory
torch.version.cann = None
torch.Tensor.npu = lambda self, *a, **k: self
torch.Tensor.record_stream = lambda self, stream: None


class OnCpu(torch.overrides.TorchFunctionMode):
    """Sends "npu" devices to the CPU and ignores pinning."""

    @staticmethod
    def _device(value):
        if isinstance(value, str) and value.split(":")[0] == "npu":
            return "cpu"
        if isinstance(value, torch.device) and value.type == "npu":
            return torch.device("cpu")
        return value

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            return args[0]
        graphs.refuse_read_back(func)
        if "pin_memory" in kwargs or "device" in kwargs:
            kwargs = {k: self._device(v) for k, v in kwargs.items() if k != "pin_memory"}
        if func is torch.Tensor.to:
            args = tuple(self._device(a) for a in args)
        return func(*args, **kwargs)


# ---- installed packages ------------------------------------------------------

_version = importlib.metadata.version
# The CPU build of vLLM is a distribution of its own; vllm-ascend asks for "vllm".
importlib.metadata.version = lambda name: "0.30.0+cpu" if name == "vllm" else _version(name)

# torchvision imports without its binary extension once its operators are declared.
_torchvision = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _torchvision.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_build_info = types.ModuleType("vllm_ascend._build_info")
_build_info.__device_type__ = DEVICE
sys.modules.setdefault("vllm_ascend._build_info", _build_info)

# ---- vLLM --------------------------------------------------------------------

import vllm.utils.torch_utils as _torch_utils
import vllm.v1.utils as _v1_utils

_torch_utils.PIN_MEMORY = _v1_utils.PIN_MEMORY = False
if OLD_TORCH:
    _torch_utils.HAS_OPAQUE_TYPE = False

_register = _torch_utils.direct_register_custom_op


def _register_for_cpu(op_name, op_func, *args, dispatch_key=None, **kwargs):
    """Custom operators are registered for PrivateUse1 (the NPU's key): register them for the CPU instead."""
    if dispatch_key in (None, "PrivateUse1"):
        dispatch_key = "CPU"
    library = kwargs.get("target_lib")
    name = f"{library.ns if library is not None else 'vllm'}::{op_name}"
    return _register(op_name, graphs.python_operator(name, op_func), *args, dispatch_key=dispatch_key, **kwargs)


_torch_utils.direct_register_custom_op = _register_for_cpu

import vllm.distributed.parallel_state as _groups
import vllm.model_executor.models.registry as _registry
from vllm.platforms import current_platform

# These were registered before the wrapper above was in place.
_late = torch.library.Library("vllm", "IMPL")
for _name in ("all_reduce", "reduce_scatter", "all_gather"):
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"vllm::{_name}", "CPU"):
        _late.impl(_name, getattr(_groups, _name), "CPU")

_platform = type(current_platform)
if _platform.__name__ != "NPUPlatform":
    raise ImportError(f"vllm-ascend's platform is not the active one: {_platform}")
_platform.device_type = "cpu"
_platform.dispatch_key = "CPU"
# Found on the device's module otherwise, which is torch.cpu here.
_platform.graph_pool_handle = staticmethod(torch.npu.graph_pool_handle)
# Model classes are inspected in a child process, which would lack the stub.
_registry._run_in_subprocess = lambda fn: fn()

_on_cpu = OnCpu()
_on_cpu.__enter__()
