"""Kernels that must be rejected, each for its own reason; a check that passes one of them proves nothing."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tools.check_kernels import registry
from tools.check_kernels.lowering import A2, Rejected, check_declaration
from tools.check_kernels.simulation import Simulated
from vllm_ascend_replay import kernels


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "count"])
def copies_rows(source_ptr, target_ptr, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for row in range(count):
        value = tl.load(source_ptr + row * WIDTH + lane, mask=lane < WIDTH)
        tl.store(target_ptr + row * WIDTH + lane, value, mask=lane < WIDTH)


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "count"])
def overflows_local_memory(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    a = tl.load(source_ptr + lane, mask=lane < count)
    b = tl.load(source_ptr + lane + 1, mask=lane < count)
    tl.store(target_ptr + lane, a * b + a, mask=lane < count)


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "count"])
def stores_where_data_says(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    value = tl.load(source_ptr + lane, mask=lane < count)
    tl.store(target_ptr + lane, value, mask=(lane < count) & (value >= 3))


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "count"])
def guards_an_address_with_a_mask(source_ptr, target_ptr, count):
    value = tl.load(source_ptr + 5000, mask=count > 5000, other=7)
    tl.store(target_ptr, value)


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "count"])
def gathers_by_index(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    index = tl.load(source_ptr + lane, mask=lane < count, other=0)
    tl.store(target_ptr + lane, tl.load(source_ptr + index, mask=lane < count), mask=lane < count)


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "count"])
def has_inline_assembly(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    value = tl.load(source_ptr + lane)
    moved = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(target_ptr + lane, moved)


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "count"])
def reads_past_the_last_row(source_ptr, target_ptr, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for row in range(count):
        # Rows are WIDTH wide, so the last one must not be read to its BLOCK.
        value = tl.load(source_ptr + row * WIDTH + lane)
        tl.store(target_ptr + row * WIDTH + lane, value, mask=lane < WIDTH)


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "count"])
def writes_past_the_last_row(source_ptr, target_ptr, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for row in range(count):
        value = tl.load(source_ptr + row * WIDTH + lane, mask=lane < WIDTH)
        tl.store(target_ptr + row * WIDTH + lane, value, mask=lane < WIDTH + 1)


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "count"])
def writes_one_row_too_few(source_ptr, target_ptr, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    for row in range(count - 1):
        value = tl.load(source_ptr + row * WIDTH + lane, mask=lane < WIDTH)
        tl.store(target_ptr + row * WIDTH + lane, value, mask=lane < WIDTH)


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "count"])
def depends_on_the_grid(source_ptr, target_ptr, count):
    # Every program writes the same element; the last one wins.
    tl.store(target_ptr, tl.load(source_ptr) + tl.program_id(0) + count)


@triton.jit(do_not_specialize=["source_ptr", "target_ptr", "count"])
def meets_in_a_line(source_ptr, target_ptr, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    # Right in any order, but rows of 80 bytes do not end where lines do.
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        value = tl.load(source_ptr + row * WIDTH + lane, mask=lane < WIDTH)
        tl.store(target_ptr + row * WIDTH + lane, value, mask=lane < WIDTH)


@triton.jit
def compiles_for_every_value(source_ptr, target_ptr, count):
    tl.store(target_ptr, tl.load(source_ptr) + count)


@dataclass(frozen=True)
class Control:
    """A small kernel that should copy rows, and what to launch it with."""

    kernel: Any
    constants: tuple[tuple[str, int], ...] = ()
    rows: int = 3
    width: int = 20
    programs: int = 1

    def run(self) -> None:
        """Check and run the kernel as those of the package are; compare with a copy of the rows."""
        check_declaration(self.kernel)
        stand_in = Simulated(self.kernel, A2, frozenset({"target_ptr"}))
        source = torch.arange(self.rows * self.width, dtype=torch.int32) % 11
        target = torch.full_like(source, -5)
        stand_in[(self.programs,)](source, target, self.rows, **dict(self.constants))
        if not torch.equal(target, source):
            raise Rejected("wrong result")


def _unregistered() -> None:
    module = types.ModuleType("kernels_with_one_more")
    vars(module).update(vars(kernels))
    module.compiles_for_every_value = compiles_for_every_value
    registry.check_complete(module)


def _cold_step() -> None:
    # Runs in a process of its own, so nothing has to be put back.
    whole = kernels.warm_up
    kernels.warm_up = lambda **given: whole(**{**given, "kept_kv_start": None})
    registry.check_warm_up()


OUTSIDE = r"SIGSEGV"
_SHAPE = (("WIDTH", 20), ("BLOCK", 32))

# The good one among the bad ones: they are not rejected for being launched this way.
ACCEPTED: Callable[[], None] = Control(copies_rows, _SHAPE).run

CONTROLS: dict[str, tuple[Callable[[], None], str]] = {
    "UB overflow": (Control(overflows_local_memory, (("BLOCK", 65536),)).run, r"ub overflow, requires"),
    "data-dependent store mask": (
        Control(stores_where_data_says, (("BLOCK", 64),)).run,
        r"target_ptr is read and written back",
    ),
    "masked load out of range": (Control(guards_an_address_with_a_mask).run, OUTSIDE),
    "indexed gather": (Control(gathers_by_index, (("BLOCK", 64),)).run, r"element by element"),
    "inline assembly": (Control(has_inline_assembly, (("BLOCK", 64),)).run, r"inline assembly|inline_asm"),
    "read past the last row": (Control(reads_past_the_last_row, _SHAPE).run, OUTSIDE),
    "write past the last row": (Control(writes_past_the_last_row, _SHAPE).run, OUTSIDE),
    "missing row": (Control(writes_one_row_too_few, _SHAPE).run, r"wrong result"),
    "programs that race": (Control(depends_on_the_grid, programs=5).run, r"write into the same 32 bytes"),
    "stores that meet in a line": (
        Control(meets_in_a_line, _SHAPE, programs=3).run,
        r"write into the same 32 bytes of target_ptr",
    ),
    "argument that recompiles": (Control(compiles_for_every_value).run, r"specialised on .* count"),
    "step without warm-up": (_cold_step, r"a step compiles .*KV_START.*True"),
    "unregistered kernel": (_unregistered, r"not registered .*: compiles_for_every_value"),
}
