"""Run lowered kernels on the CPU, between guard pages.

Two levels are run. ``ttadapter`` is what triton-ascend hands to Ascend's compiler: linalg on memrefs, where every
decision about masks and bounds of memory accesses has been taken. ``hivm`` is what that compiler makes of it, just
before it lays out local memory and places the synchronisation: loads, stores and vector instructions. Both are
lowered to LLVM with the released tools and compiled for this machine. An access outside a buffer is a SIGSEGV.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from triton._C.libtriton import ir
from triton._C.libtriton import llvm as triton_llvm

from tools.check_kernels.lowering import (
    A2,
    TOOLS,
    Lowered,
    Rejected,
    Specialisation,
    Target,
    check,
    parameter_names,
    run_compiler,
)

GUARD = 1 << 20
LINE = 32
"""Bytes in which stores of two cores must not meet."""
PAGE = mmap.PAGESIZE

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


# -- memory ---------------------------------------------------------------------------------------------------------


class Guarded:
    """A copy of a tensor's memory that touches an inaccessible megabyte in front or behind."""

    def __init__(self, tensor: torch.Tensor, in_front: bool) -> None:
        self.flat = _extent(tensor)
        self.size = self.flat.numel() * self.flat.element_size()
        body = max(PAGE, -(-self.size // PAGE) * PAGE)
        self.length = body + 2 * GUARD
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.base = _libc.mmap(None, self.length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert self.base not in (None, ctypes.c_void_p(-1).value), "out of memory"
        for guard in (self.base, self.base + GUARD + body):
            assert _libc.mprotect(guard, GUARD, 0) == 0
        self.address = self.base + GUARD + (0 if in_front else body - self.size)
        # What lies between the buffer and the far guard is no zero that could pass for a result.
        ctypes.memset(self.base + GUARD, 0xA5, body)
        ctypes.memmove(self.address, self.flat.data_ptr(), self.size)

    def bytes(self) -> np.ndarray:
        """The buffer as it is now."""
        return np.frombuffer(ctypes.string_at(self.address, self.size), dtype=np.uint8)

    def close(self) -> torch.Tensor:
        """Free the memory; gives what it held, shaped like ``flat``."""
        out = torch.empty_like(self.flat)
        ctypes.memmove(out.data_ptr(), self.address, self.size)
        assert _libc.munmap(self.base, self.length) == 0
        return out


def _extent(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from a tensor's first element to its last, gaps of strided ones included."""
    if tensor.numel() == 0:
        return tensor.flatten()
    count = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return torch.as_strided(tensor, (count,), (1,))


class _UnrankedMemref(ctypes.Structure):
    _fields_ = [("rank", ctypes.c_int64), ("descriptor", ctypes.c_void_p)]

    def unpack(self) -> tuple[int, list[int], list[int]]:
        """Address in elements apart: base, offset, sizes and strides."""
        words = (ctypes.c_int64 * (3 + 2 * self.rank)).from_address(self.descriptor)
        return words[1], [words[2], *words[3 : 3 + self.rank]], list(words[3 + self.rank :])


@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(_UnrankedMemref), ctypes.POINTER(_UnrankedMemref))
def _memref_copy(size: int, source: Any, target: Any) -> None:
    """MLIR's run-time routine for copies between memrefs."""
    from_base, (from_offset, *shape), from_strides = source.contents.unpack()
    to_base, (to_offset, *_), to_strides = target.contents.unpack()
    dense = bool(shape) and from_strides[-1] == to_strides[-1] == 1
    run = shape.pop() if dense else 1
    for index in itertools.product(*map(range, shape)):
        a = from_offset + sum(i * s for i, s in zip(index, from_strides))
        b = to_offset + sum(i * s for i, s in zip(index, to_strides))
        ctypes.memmove(to_base + b * size, from_base + a * size, run * size)


_block = ctypes.c_int64(0)
_block_index = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: _block.value)

llvm.add_symbol("memrefCopy", ctypes.cast(_memref_copy, ctypes.c_void_p).value)
llvm.add_symbol("sim_block_index", ctypes.cast(_block_index, ctypes.c_void_p).value)


# -- code -----------------------------------------------------------------------------------------------------------

_BUFFERIZE = (
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
)
_TO_LLVM = (
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-math-to-llvm",
    "--convert-index-to-llvm",
    "--memref-expand",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--lower-affine",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
_CTYPES = {"i1": ctypes.c_bool, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}


def _optimise(module: str, *passes: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        source, result = Path(name, "in.mlir"), Path(name, "out.mlir")
        source.write_text(module)
        done = subprocess.run(
            [str(TOOLS / "bishengir-opt"), str(source), *passes, "-o", str(result)], capture_output=True, text=True
        )
        if done.returncode:
            raise Unsupported(done.stderr.strip().splitlines()[0].split("in.mlir:")[-1])
        return result.read_text()


class Unsupported(Exception):
    """The lowered code has an operation that the released tools cannot turn into CPU code."""


class _Program:
    """A module in the LLVM dialect, compiled for this machine."""

    def __init__(self, name: str, module: str) -> None:
        # LLVM would leave out reads whose values nobody uses, such as those past the end of a row. They must happen.
        module, copies = re.subn(r"isVolatile = false", "isVolatile = true", module)
        module, loads = re.subn(r"llvm\.load (?!volatile)", "llvm.load volatile ", module)
        assert copies + loads, "no memory access in the kernel"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "module.mlir")
            path.write_text(module)
            context = ir.context()
            ir.load_dialects(context)
            llvm_context = triton_llvm.context()
            lowered = triton_llvm.to_module(ir.parse_mlir_module(str(path), context), llvm_context)
        # Folds constant expressions that llvmlite's newer LLVM no longer parses.
        triton_llvm.optimize_module(lowered, triton_llvm.OPTIMIZE_O1)
        parsed = llvm.parse_assembly(str(lowered))
        parsed.verify()
        machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
        self._engine = llvm.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()
        self._address = self._engine.get_function_address(name)

    def bind(self, arguments: Sequence[tuple[Any, Any]]) -> Callable[..., None]:
        """A call with fixed leading arguments, each a ctypes type and a value."""
        kinds = [kind for kind, _ in arguments]
        values = [value for _, value in arguments]

        def call(*trailing: int) -> None:
            prototype = ctypes.CFUNCTYPE(None, *kinds, *[ctypes.c_int32] * len(trailing))
            prototype(self._address)(*values, *trailing)

        return call


def _memref(address: int | None, count: int) -> list[tuple[Any, Any]]:
    """A one-dimensional memref as a function takes it: allocation, data, offset, size and stride."""
    return [
        (ctypes.c_void_p, address),
        (ctypes.c_void_p, address),
        (ctypes.c_int64, 0),
        (ctypes.c_int64, count),
        (ctypes.c_int64, 1),
    ]


class AdapterLevel:
    """The kernel as triton-ascend lowered it."""

    name = "ttadapter"

    def __init__(self, spec: Specialisation, adapter: str, target: Target) -> None:
        name = re.search(r"func\.func @(\w+)", adapter).group(1)
        self._program = _Program(name, _optimise(adapter, *_BUFFERIZE, *_TO_LLVM))

    def programs(self, arguments: list[tuple[Any, Any]], grid: int) -> Callable[[int], None]:
        """What runs one program of the grid, by its number."""
        call = self._program.bind([*_memref(None, 0), *_memref(None, 0), *arguments])
        return lambda program: call(grid, 1, 1, program, 0, 0)


class HivmLevel:
    """The kernel as Ascend's compiler optimised it, before local memory is laid out."""

    name = "hivm"

    def __init__(self, spec: Specialisation, adapter: str, target: Target) -> None:
        name = re.search(r"func\.func @(\w+)", adapter).group(1)
        with tempfile.TemporaryDirectory() as folder:
            said = run_compiler(
                adapter,
                target,
                Path(folder),
                "--mlir-print-ir-before=hivm-plan-memory",
                "--mlir-print-ir-module-scope",
                "--mlir-disable-threading",
            )
        dumps = re.split(r"// -----// IR Dump Before \w+[^\n]*//----- //\n", said)
        dumps = [dump for dump in dumps if f"@{name}(" in dump and "hivm.hir" in dump]
        if not dumps:
            raise Unsupported("the compiler printed no HIVM module")
        # Memory is planned more than once; before the last time, everything is a buffer. Messages follow the module.
        printed = dumps[-1][: dumps[-1].rindex("\n}\n") + 3]
        module = _optimise(_to_upstream(printed), "--execution-engine-convert-hivm-to-upstream")
        module = _strip_attributes(module)
        match = re.search(rf"func\.func @{name}\((.*?)\) \{{", module, re.S)
        assert match is not None
        types = [argument.split(": ", 1)[1].strip() for argument in re.split(r", (?=%arg)", match.group(1))]
        # Hidden arguments come first; the last of them are the two byte pointers for locks and workspace.
        first = next(i for i, kind in enumerate(types) if kind.startswith("memref<?xi8")) + 2
        self._hidden: list[tuple[Any, Any]] = []
        for kind in types[:first]:
            self._hidden += _memref(None, 0) if kind.startswith("memref") else [(_CTYPES[kind], 0)]
        self._program = _Program(name, _strip_attributes(_optimise(module, *_TO_LLVM)))

    def programs(self, arguments: list[tuple[Any, Any]], grid: int) -> Callable[[int], None]:
        """What runs one program of the grid, by its number."""
        call = self._program.bind([*self._hidden, *arguments])

        def run(program: int) -> None:
            _block.value = program
            call(grid, 1, 1)

        return run


_ATTRIBUTE = re.compile(
    r" attributes \{| ?\{(?=(?:hacc|hivm|tt|annotation|pipeline|DataPartition|mark|map_for|func_dyn|inserted|restrict|"
    r"multi|loop|atomic|may_|already|lib|enable|debug|op_|unlikely|storage|tcore|core|llvm\.|__)[\w.]*)"
)


def _strip_attributes(module: str) -> str:
    """Drop the attributes of dialects that later tools do not know; they carry no meaning for execution."""
    kept, at = [], 0
    while match := _ATTRIBUTE.search(module, at):
        kept.append(module[at : match.start()])
        at, depth = match.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(module[at], 0)
            at += 1
    kept.append(module[at:])
    return "".join(kept)


def _generic(inputs: Sequence[tuple[str, str]], output: tuple[str, str], body: Sequence[str]) -> str:
    """An element-wise operation in linalg; scalars are broadcast. ``body`` yields ``%y``."""
    maps = ["affine_map<(d0) -> (d0)>" if kind.startswith("memref") else "affine_map<(d0) -> ()>" for _, kind in inputs]
    maps.append("affine_map<(d0) -> (d0)>")
    elements = [kind.removeprefix("memref<").rstrip(">").split("x")[-1] for _, kind in [*inputs, output]]
    names = [*(f"%in{i}" for i in range(len(inputs))), "%out"]
    arguments = ", ".join(f"{name}: {element}" for name, element in zip(names, elements))
    ins = f"ins({', '.join(v for v, _ in inputs)} : {', '.join(k for _, k in inputs)}) " if inputs else ""
    lines = "\n".join(body)
    return (
        f'linalg.generic {{indexing_maps = [{", ".join(maps)}], iterator_types = ["parallel"]}} {ins}'
        f"outs({output[0]} : {output[1]}) {{\n^bb0({arguments}):\n{lines}\nlinalg.yield %y : {elements[-1]}\n}}"
    )


def _vector_operation(match: re.Match[str]) -> str:
    """One of HIVM's vector instructions that the released conversion leaves out, as linalg."""
    name, ins, rest = match["name"], match["ins"], match["rest"]
    values, _, kinds = ins.partition(" : ")
    inputs = list(zip(values.split(", "), re.split(r", (?![^<]*>)", kinds)))
    output, kind = match["out"], match["kind"]
    element = kind.removeprefix("memref<").rstrip(">").split("x")[-1]
    if name == "vcast" and kinds.endswith("xi32>") and element == "i64":
        body = ["%y = arith.extsi %in0 : i32 to i64"]
    elif name == "vadd":
        body = [f"%y = arith.addi %in0, %in1 : {element}"]
    elif name == "vsel":
        body = [f"%y = arith.select %in0, %in1, %in2 : {element}"]
    elif name == "vcmp" and "compare_mode" not in rest:
        body = ["%y = arith.cmpi eq, %in0, %in1 : i32"]
    else:
        return match.group(0)
    return _generic(inputs, (output, kind), body)


def _range_operation(match: re.Match[str]) -> str:
    body = [
        "%i = linalg.index 0 : index",
        f"%s = arith.muli %i, {match['stride']} : index",
        f"%o = arith.addi %s, {match['offset']} : index",
        "%y = arith.index_cast %o : index to i32",
    ]
    return _generic([], (match["out"], match["kind"]), body)


def _to_upstream(module: str) -> str:
    """Replace what has no meaning without a device, and the vector instructions that have no conversion."""
    module = re.sub(r"hivm\.hir\.get_block_idx -> i64", "func.call @sim_block_index() : () -> i64", module)
    module = re.sub(r"^\s*hivm\.hir\.(set_mask_norm|pipe_barrier|set_flag|wait_flag)[^\n]*\n", "", module, flags=re.M)
    module = re.sub(r"^\s*annotation\.mark[^\n]*\n", "", module, flags=re.M)
    module = re.sub(r"(module[^\n]*\{\n)", r"\1  func.func private @sim_block_index() -> i64\n", module, count=1)
    module = re.sub(r", #hivm\.address_space<\w+>", "", module)
    module = re.sub(
        r"hivm\.hir\.(?P<name>vcast|vadd|vsel|vcmp) ins\((?P<ins>[^()]*)\) outs\((?P<out>%\w+) : (?P<kind>[^()]*)\)"
        r"(?P<rest>[^\n]*)",
        _vector_operation,
        module,
    )
    return re.sub(
        r"hivm\.hir\.varange offset\[(?P<offset>%\w+)\] strides\[(?P<stride>%\w+)\] "
        r"outs\((?P<out>%\w+) : (?P<kind>memref<\d+xi32>)\)",
        _range_operation,
        module,
    )


# -- launches -------------------------------------------------------------------------------------------------------

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def specialise(kernel: Any, arguments: dict[str, Any]) -> tuple[Specialisation, dict[str, Any]]:
    """What Triton would compile for these arguments, and those that are passed at run time."""
    signature, constants, passed = [], [], {}
    for parameter in kernel.params:
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            constants.append((name, value))
            continue
        passed[name] = value
        if isinstance(value, torch.Tensor):
            signature.append((name, "*" + _TYPES[value.dtype]))
        else:
            assert -(2**31) <= value < 2**31, f"{name} = {value} would change the kernel's type"
            signature.append((name, "i32"))
    return Specialisation(kernel, tuple(signature), tuple(constants)), passed


class Simulated:
    """Stands in for a kernel: ``kernel[grid](...)`` checks what Triton would compile and runs it at every level."""

    def __init__(self, kernel: Any, target: Target, outputs: frozenset[str], *, seed: int = 0) -> None:
        self.kernel, self.target, self.outputs = kernel, target, outputs
        self.compiled: dict[Specialisation, Lowered] = {}
        self.launches: dict[str, int] = {}
        self._levels: dict[Specialisation, list[Any]] = {}
        self._random = random.Random(seed)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*positional: Any, **named: Any) -> None:
            assert len(grid) == 1, f"grid {grid}"
            assert 1 <= grid[0] <= 65535, f"grid {grid}"
            names = parameter_names(self.kernel)
            unknown = set(named) - set(names)
            assert not unknown, f"compiler options {unknown}, which triton-ascend does not know"
            arguments = {**dict(zip(names, positional)), **named}
            spec, passed = specialise(self.kernel, arguments)
            self._run(spec, passed, grid[0])

        return launch

    def _run(self, spec: Specialisation, passed: dict[str, Any], grid: int) -> None:
        if spec not in self.compiled:
            self.compiled[spec] = check(spec, self.target, self.outputs)
            self._levels[spec] = list(self._compile(spec, self.compiled[spec].adapter))
        first: dict[str, torch.Tensor] = {}
        for level in self._levels[spec]:
            for in_front in (False, True):
                results = self._run_once(level, passed, grid, in_front)
                for name, result in results.items():
                    if not torch.equal(first.setdefault(name, result), result):
                        raise Rejected(f"{name} differs between levels or runs")
            self.launches[level.name] = self.launches.get(level.name, 0) + 1
        for name, result in first.items():
            _extent(passed[name]).copy_(result.view(passed[name].dtype))

    def _compile(self, spec: Specialisation, adapter: str) -> Iterator[Any]:
        yield AdapterLevel(spec, adapter, self.target)
        # The A5 compiler goes another way, to vector functions that nothing released turns into CPU code.
        if self.target == A2:
            try:
                yield HivmLevel(spec, adapter, self.target)
            except Unsupported as error:
                raise Rejected(f"no CPU code for the compiler's module: {error}") from error

    def _run_once(self, level: Any, passed: dict[str, Any], grid: int, in_front: bool) -> dict[str, torch.Tensor]:
        """All programs, in any order: no program may wait for another or write what another writes."""
        buffers = {name: Guarded(v, in_front) for name, v in passed.items() if isinstance(v, torch.Tensor)}
        arguments: list[tuple[Any, Any]] = []
        for name, value in passed.items():
            if name in buffers:
                arguments += _memref(buffers[name].address, buffers[name].flat.numel())
            else:
                arguments.append((ctypes.c_int32, value))
        order = list(range(grid))
        self._random.shuffle(order)
        run = level.programs(arguments, grid)
        # In front, buffers start on a page, as whole allocations do: lines of memory are where they will be.
        watch = _Lines({n: b for n, b in buffers.items() if n in self.outputs}) if in_front and grid > 1 else None
        for program in order:
            run(program)
            if watch is not None:
                watch.after(program)
        # As integers: equality must hold for NaNs.
        return {name: _as_integers(buffer.close()) for name, buffer in buffers.items()}


class _Lines:
    """Watches that every line of 32 bytes is changed by one program only: Ascend may lose stores of two cores there."""

    def __init__(self, buffers: dict[str, Guarded]) -> None:
        self._buffers = buffers
        self._seen = {name: buffer.bytes() for name, buffer in buffers.items()}
        self._owner = {name: np.full(-(-len(seen) // LINE), -1) for name, seen in self._seen.items()}

    def after(self, program: int) -> None:
        """Call it when a program has ended.

        Raises:
            Rejected: it wrote into another one's line.
        """
        for name, buffer in self._buffers.items():
            now = buffer.bytes()
            lines = np.unique(np.flatnonzero(now != self._seen[name]) // LINE)
            others = self._owner[name][lines]
            shared = lines[(others != -1) & (others != program)]
            if len(shared):
                owner = self._owner[name][shared[0]]
                raise Rejected(f"programs {owner} and {program} write into the same {LINE} bytes of {name}")
            self._owner[name][lines] = program
            self._seen[name] = now


def _as_integers(flat: torch.Tensor) -> torch.Tensor:
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


@contextmanager
def simulated(module: Any, name: str, target: Target, outputs: frozenset[str]) -> Iterator[Simulated]:
    """Replace the module's kernel ``name`` for the launchers."""
    kernel = getattr(module, name)
    stand_in = Simulated(kernel, target, outputs)
    setattr(module, name, stand_in)
    try:
        yield stand_in
    finally:
        setattr(module, name, kernel)
