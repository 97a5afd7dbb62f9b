"""From a Triton kernel to what Ascend's compiler hands to CANN, and what must hold of it."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ascendnpuir
from triton._C.libtriton import ir
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

TOOLS = Path(ascendnpuir.__file__).parent / "bin"
DEVICE_LIBRARIES = Path(ascendnpuir.__file__).parent / "lib"

# What may be left in the module that goes to hivmc, the assembler that only CANN ships.
KNOWN_DIALECTS = frozenset(
    {"affine", "arith", "builtin", "cf", "func", "hivm", "hivm_regbaseintrins", "llvm", "memref", "scf", "vector"}
)


@dataclass(frozen=True)
class Target:
    """One generation of devices."""

    arch: str
    compiler: str
    assembler: str
    library: str
    """Bitcode with the run-time routines that compiled kernels call."""
    front_end: tuple[tuple[str, Any], ...] = ()
    flags: tuple[str, ...] = ()


A2 = Target(
    "Ascend910B1",
    "bishengir-compile",
    "hivmc",
    "meta_op.aiv.c220.bc",
    flags=("--enable-hivm-compile=true", "--enable-auto-bind-sub-block=True"),
)
A5 = Target(
    "Ascend910_9589",
    "bishengir-compile-a5",
    "hivmc-a5",
    "meta_op.aiv.c310.bc",
    front_end=(("compile_on_910_95", True), ("multibuffer", True)),
)
TARGETS = (A2, A5)


class Rejected(Exception):
    """The kernel breaks a rule; the message says which."""


@dataclass(frozen=True)
class Specialisation:
    """One thing that Triton would compile: a kernel, the types of its arguments and its constants."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    """Name and Triton type (``*bf16``, ``i32``) of every argument that is passed at run time."""
    constants: tuple[tuple[str, Any], ...]

    @property
    def pointers(self) -> list[str]:
        return [name for name, kind in self.signature if kind.startswith("*")]


@dataclass(frozen=True)
class Lowered:
    """The result of the whole pipeline for one target."""

    adapter: str
    """Linalg module, the output of triton-ascend."""
    ub_bytes: int
    """Local memory that the compiler laid out."""
    ub_limit: int
    routines: tuple[str, ...]
    """Run-time routines that the kernel calls."""


def parameter_names(kernel: Any) -> list[str]:
    return [parameter.name for parameter in kernel.params]


def check_declaration(kernel: Any) -> None:
    """Nothing that varies from step to step may be a reason to compile again.

    Raises:
        Rejected: an argument is specialised on its value or alignment.
    """
    loose = [p.name for p in kernel.params if not p.is_constexpr and not p.do_not_specialize]
    if loose:
        raise Rejected(f"specialised on the value or alignment of {', '.join(loose)}")


@functools.cache
def to_adapter(spec: Specialisation, target: Target) -> str:
    """Triton to linalg, with triton-ascend's front end and its adapter.

    Raises:
        Rejected: either does not accept the kernel.
    """
    backend = backends["ascend"].compiler(GPUTarget("npu", target.arch, 0))
    options = backend.parse_options(dict(target.front_end))
    source = ASTSource(fn=spec.kernel, signature=dict(spec.signature), constants=dict(spec.constants))
    metadata = {"hash": source.hash(), "target": backend.target, **options.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        return stages["ttadapter"](stages["ttir"](module, metadata), metadata)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise Rejected(f"triton-adapter-opt: {lines[0] if lines else error}") from error
    except Exception as error:
        raise Rejected(f"front end: {str(error).strip().splitlines()[-1]}") from error


def argument_kinds(spec: Specialisation, adapter: str) -> dict[str, int | None]:
    """How the lowered code uses each pointer: 0 reads, 1 writes, 2 reads and writes back, ``None`` not at all."""
    match = re.search(r"func\.func @\w+\((.*?)\) attributes", adapter, re.S)
    assert match is not None, "no kernel in the adapter's module"
    arguments = re.split(r", (?=%arg)", match.group(1))
    # Two hidden pointers in front, the grid and the program ids behind.
    user = arguments[2:-6]
    assert len(user) == len(spec.signature), f"{len(user)} arguments for {len(spec.signature)}"
    kinds: dict[str, int | None] = {}
    for (name, kind), argument in zip(spec.signature, user):
        if kind.startswith("*"):
            found = re.search(r"tensor_kind = (\d)", argument)
            kinds[name] = int(found.group(1)) if found else None
    return kinds


def check_adapter(spec: Specialisation, adapter: str, outputs: set[str]) -> None:
    """Outputs are written and nothing else is, and memory is moved in blocks.

    Raises:
        Rejected: a masked store became a read-modify-write, or an access goes element by element.
    """
    words = ("nothing", "read", "written", "read and written back")
    for name, kind in argument_kinds(spec, adapter).items():
        expected = 1 if name in outputs else 0
        if kind != expected:
            used = words[0 if kind is None else kind + 1]
            raise Rejected(f"{name} is {used}, should be {words[expected + 1]} (tensor_kind {kind})")
    count = adapter.count("ExtractedLoadOrStore")
    if count:
        raise Rejected(f"{count} memory accesses go element by element (ExtractedLoadOrStore)")


def _without_mix_mode(adapter: str) -> str:
    # The released compiler does not know this attribute of the released front end.
    return re.sub(r', mix_mode\s*=\s*"[^"]*"', "", adapter)


def run_compiler(adapter: str, target: Target, folder: Path, *flags: str) -> str:
    """Run Ascend's compiler on a module and give what it said; its files stay in ``folder``."""
    source = folder / "kernel.mlir"
    source.write_text(_without_mix_mode(adapter))
    command = [
        str(TOOLS / target.compiler),
        str(source),
        f"--target={target.arch}",
        "--enable-hfusion-compile=true",
        "--enable-triton-kernel-compile=true",
        "--enable-auto-multi-buffer=True",
        "--enable-tuning-mode",
        *target.flags,
        *flags,
        "-o",
        str(folder / "kernel"),
    ]
    # A bare PATH: where CANN is installed its assembler must not be found, or the check would check something else.
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, cwd=folder, env=environment, timeout=300)
    return done.stderr.decode(errors="replace")


@functools.cache
def _library(target: Target) -> bytes:
    return (DEVICE_LIBRARIES / target.library).read_bytes()


_ELEMENT_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}


def _planned_ub(module: str) -> int:
    """End of the highest buffer that the compiler placed in local memory."""
    top = 0
    # Names of values are local to a function.
    for function in re.split(r"^\s*(?:func|llvm)\.func ", module, flags=re.M):
        constants = dict(re.findall(r"(%\w+) = arith\.constant (\d+) : i64", function))
        constants |= dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", function))
        for address, shape in re.findall(
            r"pointer_cast\((%\w+)\)[^:]*: memref<([\w]+), #hivm\.address_space<ub>>", function
        ):
            *dims, element = shape.split("x")
            size = _ELEMENT_BYTES[element]
            for dim in dims:
                size *= int(dim)
            top = max(top, int(constants[address]) + size)
    return top


def _ub_limit(module: str) -> int:
    found = re.search(r'"UB_SIZE", (\d+) : i32', module)
    return int(found.group(1)) // 8 if found else 0


def check_compile(adapter: str, target: Target) -> Lowered:
    """Compile up to the assembler and look at what it would be given.

    Raises:
        Rejected: the compiler stops before the assembler, or leaves what nothing here can vouch for.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        said = run_compiler(adapter, target, folder, f"--save-temps={name}")
        result = folder / "module.hivm.opt.mlir"
        errors = [
            line
            for line in said.splitlines()
            if "error" in line.lower() and not re.search(r"hivmc|Failed to run BiShengIR pipeline", line)
        ]
        overflow = re.search(r"ub overflow, requires \d+ bits while \d+ bits available", said)
        if overflow:
            raise Rejected(overflow.group(0))
        if errors:
            raise Rejected(f"{target.compiler}: {errors[0][:300]}")
        if not result.exists():
            raise Rejected(f"{target.compiler} left no module: {said[:300]}")
        if f"Cannot find {target.assembler} under $PATH" not in said:
            raise Rejected(f"{target.compiler} did not come to {target.assembler}: {said[:300]}")
        module = result.read_text()
    if "llvm.inline_asm" in module:
        raise Rejected("inline assembly reaches the assembler")
    dialects = set(re.findall(r"^\s+(?:%[\w:, #]+ = )?\"?([a-z_]+)\.[a-z_.]+", module, re.M))
    if dialects - KNOWN_DIALECTS:
        raise Rejected(f"unknown dialects reach the assembler: {', '.join(sorted(dialects - KNOWN_DIALECTS))}")
    routines = sorted(set(re.findall(r"func\.func private @(\w+)", module)))
    missing = [r for r in routines if r.removeprefix("_mlir_ciface_").encode() not in _library(target)]
    if missing:
        raise Rejected(f"not in {target.library}: {', '.join(missing)}")
    lowered = Lowered(adapter, _planned_ub(module), _ub_limit(module), tuple(routines))
    if lowered.ub_limit and lowered.ub_bytes > lowered.ub_limit:
        raise Rejected(f"{lowered.ub_bytes} bytes of local memory, {lowered.ub_limit} there are")
    return lowered


@functools.cache
def check(spec: Specialisation, target: Target, outputs: frozenset[str]) -> Lowered:
    """Everything that can be asked of the lowered code without running it.

    Raises:
        Rejected: with the rule that is broken.
    """
    adapter = to_adapter(spec, target)
    check_adapter(spec, adapter, set(outputs))
    return check_compile(adapter, target)


def jit_functions(module: Any) -> dict[str, Any]:
    """Every ``@triton.jit`` function of a module."""
    jit = sys.modules["triton.runtime.jit"].JITFunction
    return {name: value for name, value in vars(module).items() if isinstance(value, jit)}
