"""Triton kernels and their launchers: gather the replay batch, gather the states, scatter the results, pad slots.

Row ``t`` of a step belongs to a request; ``query_start_loc`` (device, int32 ``[R + 1]``) holds the request
boundaries and is authoritative. ``dropped_before`` (int32 ``[R + 1]``) counts the rows that the replay batch leaves
out before each boundary, so boundary ``b`` of the step is row ``query_start_loc[b] - dropped_before[b]`` of the
replay batch. A request keeps its **last** rows, so its kept row ``k`` is row ``k + dropped_before[r + 1]`` of the
step: kept rows are contiguous runs, and every kernel here copies runs.

The kernels run on Ascend and NVIDIA GPUs from one source; only the launch parameters differ. What Ascend needs, and
a GPU does not mind, is explained in ``docs/kernels.md``: one-dimensional grids no larger than the core count, masks
made of ``arange`` against a bound and of nothing loaded, contiguous copies, int32 arithmetic, and work cut so that
no two programs write into the same 32 bytes. Results never depend on the launch parameters.

Every argument that changes from step to step, pointers included, is exempt from specialisation: slices of a buffer
start at any address, and a kernel that compiles while serving stops every request for seconds. `warm_up` compiles
all that a configuration can ever launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

PAD_SLOT = -1
"""Slot of a row that writes no KV (vLLM's PAD_SLOT_ID)."""
PAD_ROW = -1
"""Step row of a padding row of the replay batch."""

_MAX_GRID = 65535
"""Programs that Ascend starts at most; more is an error of its Triton."""
_MAX_GATHERED = 8
"""Tensors that one launch of the state gather moves; more take another launch."""
_MAX_SCATTERED = 4
"""Tensors that one launch of the scatter moves: the final hidden states and three aux states."""

# 32 bytes: programs own whole lines of this size, because Ascend may lose neighbouring smaller stores of two cores.
_LINE = tl.constexpr(8)
# Elements of the tile for tensors that are narrow next to the states, such as positions.
_SMALL = tl.constexpr(64)


@dataclass(frozen=True)
class Tuning:
    """How launches are cut for one kind of device. Speed depends on it, results do not."""

    programs_per_core: int
    """Programs of a full grid for each core."""
    table_programs: int
    """Programs that rows of positions and slots are worth at most."""
    table_block: int
    """Rows of positions and slots copied at a time."""
    tile_bytes: int
    """Bytes of a state copied at a time."""
    gather_rows: int
    """Rows that a program of the state gather treats at a time."""
    gather_parts: int
    """Programs that share those rows' elements."""
    scatter_rows: int
    scatter_parts: int
    local_bytes: int | None = None
    """Local memory that the tiles of one launch may take, if the device has such a limit."""
    line_bytes: int = 1
    """Stores of two programs must not meet inside so many bytes."""
    options: tuple[tuple[str, int], ...] = ()
    """Compiler options of the launch. triton-ascend warns about options that it does not know, so it gets none."""


_TUNING = {
    # Few cores with at least 192 KiB of local memory each: long runs, large tiles, double buffering by the compiler.
    "npu": Tuning(
        programs_per_core=1,
        table_programs=65535,
        table_block=512,
        tile_bytes=16384,
        gather_rows=8,
        gather_parts=4,
        scatter_rows=16,
        scatter_parts=1,
        local_bytes=160 << 10,
        line_bytes=32,
    ),
    # Measured on an H200: as many small programs as there is work for, and the hardware deals them out.
    "cuda": Tuning(
        programs_per_core=400,
        table_programs=512,
        table_block=128,
        tile_bytes=4096,
        gather_rows=1,
        gather_parts=10,
        scatter_rows=1,
        scatter_parts=1,
        options=(("num_warps", 4),),
    ),
    # Triton's interpreter runs programs one after the other, so each should do much.
    "cpu": Tuning(
        programs_per_core=2,
        table_programs=2,
        table_block=512,
        tile_bytes=65536,
        gather_rows=256,
        gather_parts=1,
        scatter_rows=256,
        scatter_parts=1,
    ),
}

_num_programs: dict[str, int] = {}


def tuning(device: torch.device) -> Tuning:
    """Launch parameters for a device; kinds that were never measured get the GPU's."""
    return _TUNING.get(device.type, _TUNING["cuda"])


def num_programs(device: torch.device) -> int:
    """Largest grid on a device: what `set_num_programs` was given, or cores times programs per core."""
    handed_in = _num_programs.get(device.type)
    return handed_in or min(tuning(device).programs_per_core * _num_cores(device), _MAX_GRID)


def set_num_programs(device_type: str, count: int) -> None:
    """Bound the grids on a kind of device.

    Args:
        device_type: ``torch.device.type``, such as ``npu``.
        count: programs of a full grid, ``1 <= count <= 65535``, what Ascend takes. There: its number of vector cores.

    Raises:
        ValueError: ``count`` is out of range.
    """
    if not 1 <= count <= _MAX_GRID:
        raise ValueError(f"num_programs must be in [1, {_MAX_GRID}], got {count}")
    _num_programs[device_type] = count


@functools.cache
def _num_cores(device: torch.device) -> int:
    """Cores as the device's Triton driver counts them."""
    if device.type == "cpu":
        return 1
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    for name in ("num_vectorcore", "multiprocessor_count"):
        if name in properties:
            return int(properties[name])
    raise RuntimeError(
        f"Triton's driver names no core count for {device} ({sorted(properties)}); "
        "hand the number of programs in with set_num_programs"
    )


# -- where rows lie -------------------------------------------------------------------------------------------------


@triton.jit
def _boundary(query_start_loc_ptr, dropped_before_ptr, b, COMPACT: tl.constexpr):
    """Boundary ``b`` in rows of the replay batch (``COMPACT``) or of the step."""
    row = tl.load(query_start_loc_ptr + b)
    if COMPACT:
        row -= tl.load(dropped_before_ptr + b)
    return row


@triton.jit
def _request_span(query_start_loc_ptr, dropped_before_ptr, low, high, num_reqs, search_steps, COMPACT: tl.constexpr):
    """Requests that may own rows of ``[low, high)``: the first and one past the last.

    Both are found in one binary search, because each of its steps waits for a load.
    """
    first = num_reqs * 0
    last = num_reqs * 0
    for i in range(search_steps):
        stride = 1 << (search_steps - 1 - i)
        # Invariant: requests [0, first) end at or before `low`, requests [0, last) before `high`.
        probe = first + stride
        end = _boundary(query_start_loc_ptr, dropped_before_ptr, tl.minimum(probe, num_reqs), COMPACT)
        first = tl.where((probe <= num_reqs) & (end <= low), probe, first)
        probe = last + stride
        end = _boundary(query_start_loc_ptr, dropped_before_ptr, tl.minimum(probe, num_reqs), COMPACT)
        last = tl.where((probe <= num_reqs) & (end < high), probe, last)
    return first, tl.minimum(last + 1, num_reqs)


@triton.jit
def _own_rows(num_rows):
    """This program's share of ``num_rows`` table rows, cut at multiples of `_LINE`."""
    share = tl.cdiv(tl.cdiv(num_rows, tl.num_programs(0)), _LINE) * _LINE
    low = tl.minimum(tl.program_id(0) * share, num_rows)
    return low, tl.minimum(low + share, num_rows)


def _search_steps(num_reqs: int) -> int:
    return num_reqs.bit_length()


def _table_grid(num_rows: int, device: torch.device) -> tuple[int]:
    return (min(_ceil_div(num_rows, _LINE.value), num_programs(device), tuning(device).table_programs),)


def _ceil_div(a: int, b: int) -> int:
    # `triton.cdiv` is a kernel's function first: called on the host it takes microseconds.
    return -(-a // b)


_compiled: dict[tuple[object, ...], Any] = {}


def _launch(
    kernel: Any,
    grid: tuple[int],
    device: torch.device,
    arguments: Sequence[object],
    constants: Sequence[object],
    types: tuple[torch.dtype, ...],
) -> Any:
    """Launch ``kernel``.

    No argument is specialised, so types and constants alone say which compiled kernel runs. On a GPU it is remembered
    by them: Triton's own search for it takes longer on the host than all the rest of a launch.

    Args:
        kernel: a Triton kernel.
        grid: programs.
        device: of the tensors.
        arguments: in the kernel's order, up to the constants.
        constants: the rest of them; ``None`` among the arguments must follow from these.
        types: of the tensors among the arguments, where they can differ.

    Returns:
        The compiled kernel, on a GPU.
    """
    options = tuning(device).options
    if device.type != "cuda":
        kernel[grid](*arguments, *constants, **dict(options))
        return None
    key = (id(kernel), device.index, types, *constants)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = kernel[grid](*arguments, *constants, **dict(options))
    else:
        # Told the stream, Triton does not look for the device first.
        compiled[(*grid, 1, 1)](*_addresses(arguments), *constants, stream=_stream(device))
    return compiled


def _stream(device: torch.device) -> int:
    return triton.runtime.driver.active.get_current_stream(device.index)


def _addresses(arguments: Sequence[object]) -> list[object]:
    """The arguments with addresses for tensors.

    Triton's launcher asks a tensor for its address, and the driver whether that is the device's; an integer it takes as
    it is.
    """
    return [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]


# -- the replay batch -----------------------------------------------------------------------------------------------

_GATHER_BATCH_ARGS = (
    "query_start_loc_ptr",
    "dropped_before_ptr",
    "requests_ptr",
    "kv_start_ptr",
    "positions_ptr",
    "slots_ptr",
    "slot_stride",
    "rows_ptr",
    "boundaries_ptr",
    "kept_kv_start_ptr",
    "kept_positions_ptr",
    "kept_slots_ptr",
    "kept_slot_stride",
    "uploaded_ptr",
    "num_uploaded",
    "num_reqs",
    "num_kept_reqs",
    "num_padded",
    "search_steps",
)


@triton.jit(do_not_specialize=_GATHER_BATCH_ARGS)
def _gather_batch_kernel(
    query_start_loc_ptr,
    dropped_before_ptr,
    requests_ptr,
    kv_start_ptr,
    positions_ptr,
    slots_ptr,
    slot_stride,
    rows_ptr,
    boundaries_ptr,
    kept_kv_start_ptr,
    kept_positions_ptr,
    kept_slots_ptr,
    kept_slot_stride,
    uploaded_ptr,
    num_uploaded,
    num_reqs,
    num_kept_reqs,
    num_padded,
    search_steps,
    GROUPS: tl.constexpr,
    KV_START: tl.constexpr,
    UPLOAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if UPLOAD:
        requests_ptr = dropped_before_ptr + num_reqs + 1
        every = tl.arange(0, BLOCK)
        for i in range(tl.program_id(0) * BLOCK, num_uploaded, tl.num_programs(0) * BLOCK):
            real = every < num_uploaded - i
            tl.store(uploaded_ptr + i + every, tl.load(dropped_before_ptr + i + every, mask=real), mask=real)
    # Per-request outputs, a line of them at a time.
    few = tl.arange(0, _LINE)
    for i in range(tl.program_id(0) * _LINE, num_kept_reqs + 1, tl.num_programs(0) * _LINE):
        line = tl.zeros((_LINE,), tl.int32)
        for j in tl.static_range(_LINE):
            request = tl.load(requests_ptr + tl.minimum(i + j, tl.maximum(num_kept_reqs - 1, 0)))
            request = tl.where(i + j < num_kept_reqs, request, num_reqs)
            begin = _boundary(query_start_loc_ptr, dropped_before_ptr, request, True)
            line = tl.where(few == j, begin, line)
        tl.store(boundaries_ptr + i + few, line, mask=few < num_kept_reqs + 1 - i)
        if KV_START:
            real = few < num_kept_reqs - i
            tl.store(kept_kv_start_ptr + i + few, tl.load(kv_start_ptr + i + few, mask=real), mask=real)

    lane = tl.arange(0, BLOCK)
    low, high = _own_rows(num_padded)
    first, last = _request_span(query_start_loc_ptr, dropped_before_ptr, low, high, num_reqs, search_steps, True)
    for r in range(first, last):
        begin = tl.maximum(_boundary(query_start_loc_ptr, dropped_before_ptr, r, True), low)
        end = tl.minimum(_boundary(query_start_loc_ptr, dropped_before_ptr, r + 1, True), high)
        shift = tl.load(dropped_before_ptr + r + 1)
        for t in range(begin, end, BLOCK):
            live = lane < end - t
            tl.store(rows_ptr + t + lane, (t + shift + lane).to(tl.int64), mask=live)
            position = tl.load(positions_ptr + t + shift + lane, mask=live)
            tl.store(kept_positions_ptr + t + lane, position, mask=live)
            for g in tl.static_range(GROUPS):
                slot = tl.load(slots_ptr + g * slot_stride + t + shift + lane, mask=live)
                tl.store(kept_slots_ptr + g * kept_slot_stride + t + lane, slot, mask=live)

    total = _boundary(query_start_loc_ptr, dropped_before_ptr, num_reqs, True)
    minus_one = tl.full((BLOCK,), -1, tl.int64)  # PAD_ROW and PAD_SLOT
    for t in range(tl.maximum(low, total), high, BLOCK):
        live = lane < high - t
        tl.store(rows_ptr + t + lane, minus_one, mask=live)
        tl.store(kept_positions_ptr + t + lane, tl.zeros((BLOCK,), tl.int64), mask=live)
        for g in tl.static_range(GROUPS):
            tl.store(kept_slots_ptr + g * kept_slot_stride + t + lane, minus_one, mask=live)


class BatchGather:
    """`gather_batch` into the same tensors again and again: what stays from step to step is settled once.

    The arguments are those of `gather_batch`.

    Raises:
        ValueError: only one of ``kv_start`` and ``kept_kv_start`` was given.
    """

    def __init__(
        self,
        *,
        dropped_before: torch.Tensor,
        requests: torch.Tensor,
        rows: torch.Tensor,
        boundaries: torch.Tensor,
        kept_positions: torch.Tensor,
        kept_slot_mappings: torch.Tensor,
        num_padded: int,
        kv_start: torch.Tensor | None = None,
        kept_kv_start: torch.Tensor | None = None,
        uploaded: torch.Tensor | None = None,
    ) -> None:
        if (kv_start is None) != (kept_kv_start is None):
            raise ValueError("kv_start and kept_kv_start go together")
        self._device = device = rows.device
        self._num_padded = num_padded
        self._grid = _table_grid(num_padded, device) if num_padded else (0,)
        self._dropped_before = dropped_before
        num_kept_reqs, num_reqs = requests.shape[0], dropped_before.shape[0] - 1
        # The kernel reads one request even if there is none.
        self._requests = requests if num_kept_reqs else dropped_before
        self._kv_start = kv_start
        self._outputs = (
            rows,
            boundaries,
            kept_kv_start,
            kept_positions,
            kept_slot_mappings,
            kept_slot_mappings.stride(0),
            uploaded,
            0 if uploaded is None else uploaded.shape[0],
            num_reqs,
            num_kept_reqs,
            num_padded,
            _search_steps(num_reqs),
        )
        # GROUPS, KV_START, UPLOAD, BLOCK
        uploads = uploaded is not None
        self._constants = (kept_slot_mappings.shape[0], kv_start is not None, uploads, tuning(device).table_block)
        self._types: tuple[torch.dtype, torch.dtype] | None = None
        """Of the positions and slots for which the compiled kernel is at hand, on a GPU."""
        self._run: Any = None
        self._inputs: list[object] = []
        self._rest: tuple[object, ...] = ()

    def __call__(
        self,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        slot_mappings: torch.Tensor,
        source: torch.Tensor | None = None,
    ) -> None:
        """Launch; ``source`` is what to upload."""
        if self._num_padded == 0:
            return
        if source is None:
            source = self._dropped_before
        types = (positions.dtype, slot_mappings.dtype)
        if types == self._types:
            self._run(
                query_start_loc.data_ptr(),
                source.data_ptr(),
                *self._inputs,
                positions.data_ptr(),
                slot_mappings.data_ptr(),
                slot_mappings.stride(0),
                *self._rest,
                stream=_stream(self._device),
            )
            return
        inputs = (self._requests, self._kv_start)
        sources = (query_start_loc, source, *inputs, positions, slot_mappings, slot_mappings.stride(0))
        arguments = (*sources, *self._outputs)
        compiled = _launch(_gather_batch_kernel, self._grid, self._device, arguments, self._constants, types)
        if compiled is not None:
            self._types, self._run = types, compiled[(*self._grid, 1, 1)]
            self._inputs, self._rest = _addresses(inputs), (*_addresses(self._outputs), *self._constants)


def gather_batch(
    *,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    slot_mappings: torch.Tensor,
    upload: tuple[torch.Tensor, torch.Tensor] | None = None,
    **tensors: Any,
) -> None:
    """Fill the replay batch's row table, boundaries, positions, slot mappings and KV starts in one launch.

    The device's boundaries decide. Where they leave fewer kept rows than ``num_padded``, the rest is padding; where
    they leave more, the rows from ``num_padded`` on are not written.

    Args:
        query_start_loc: int32 ``[R + 1]``, device boundaries of the step, not decreasing.
        dropped_before: int32 ``[R + 1]``, rows left out before each boundary; at most a request's rows for each.
        requests: int32 ``[R']``, ascending indices of the requests with kept rows; ``R' = 0`` gives only padding.
        positions: int64 ``[>= T]``.
        slot_mappings: int64 ``[G, >= T]``, last dimension contiguous, ``G >= 1``.
        rows: out, int64 ``[>= num_padded]``; ``PAD_ROW`` from the last kept row to ``num_padded``.
        boundaries: out, int32 ``[>= R' + 1]``; the last one is the number of kept rows.
        kept_positions: out, int64 ``[>= num_padded]``; 0 on padding rows.
        kept_slot_mappings: out, int64 ``[G, >= num_padded]``; ``PAD_SLOT`` on padding rows.
        num_padded: rows to fill; 0 launches nothing and writes nothing.
        kv_start: int32 ``[R']``, first position of which a kept request's late layers hold window KV.
        kept_kv_start: out, int32 ``[>= R']``; given if ``kv_start`` is.
        upload: a source and out, both int32 ``[n]``: the launch copies it, which spares a launch where the device can
            read the host's memory. The source holds ``dropped_before``, then ``requests``, and is read in their place.

    No output may alias an input or another output. For Ascend, outputs and their group stride are multiples of 32
    bytes, so that no two cores write into one line; any allocation of whole buffers is.

    Raises:
        ValueError: only one of ``kv_start`` and ``kept_kv_start`` was given.
    """
    source, uploaded = upload or (None, None)
    BatchGather(uploaded=uploaded, **tensors)(query_start_loc, positions, slot_mappings, source)


# -- runs of rows ---------------------------------------------------------------------------------------------------


@triton.jit
def _copy_rows(
    source_ptr,
    target_ptr,
    source_row,
    target_row,
    count,
    part,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Copy this part of ``count <= ROWS`` consecutive rows of ``WIDTH`` elements; 0: there is no such tensor."""
    if WIDTH > 0:
        BITS: tl.constexpr = target_ptr.dtype.element_ty.primitive_bitwidth
        BLOCK: tl.constexpr = _SMALL if ROWS * WIDTH <= _SMALL else 8 * TILE_BYTES // BITS
        source = source_ptr + tl.cast(source_row, tl.int64) * WIDTH
        target = target_ptr + tl.cast(target_row, tl.int64) * WIDTH
        if ALIGNED and (WIDTH * BITS) % 128 == 0:
            source = tl.multiple_of(source, 16)
            target = tl.multiple_of(target, 16)
        lane = tl.arange(0, BLOCK)
        size = count * WIDTH
        for c in range(part * BLOCK, size, PARTS * BLOCK):
            live = lane < size - c
            tl.store(target + c + lane, tl.load(source + c + lane, mask=live), mask=live)


@triton.jit
def _zero_rows(
    target_ptr,
    target_row,
    count,
    part,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if WIDTH > 0:
        BITS: tl.constexpr = target_ptr.dtype.element_ty.primitive_bitwidth
        BLOCK: tl.constexpr = _SMALL if ROWS * WIDTH <= _SMALL else 8 * TILE_BYTES // BITS
        target = target_ptr + tl.cast(target_row, tl.int64) * WIDTH
        if ALIGNED and (WIDTH * BITS) % 128 == 0:
            target = tl.multiple_of(target, 16)
        lane = tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), target_ptr.dtype.element_ty)
        size = count * WIDTH
        for c in range(part * BLOCK, size, PARTS * BLOCK):
            tl.store(target + c + lane, zeros, mask=lane < size - c)


# Types that the kernels move as they are. Bits are moved, not values, so every other type of the same size goes as an
# integer: bool, fp8 and fp64 are not the same, or not there, in all of Triton's backends.
_MOVED = {torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int16, torch.int32, torch.int64}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_rows(tensors: Sequence[torch.Tensor], name: str) -> tuple[list[torch.Tensor], list[int]]:
    """The tensors in types that the kernels move, and the elements of a row of each."""
    moved, widths = [], []
    for i, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}[{i}] must be contiguous, got strides {tensor.stride()} for {tuple(tensor.shape)}")
        moved.append(tensor if tensor.dtype in _MOVED else tensor.view(_INTEGERS[tensor.element_size()]))
        widths.append(math.prod(tensor.shape[1:]))
    return moved, widths


def _cut_rows(cut: Tuning, rows: int, tensors: Sequence[torch.Tensor], widths: Sequence[int]) -> dict[str, int]:
    """``ROWS`` and ``TILE`` for tensors with ``widths`` elements in a row; the device's own where it can be."""
    # A block of rows ends where a line ends, in every tensor.
    while any(rows * width * tensor.element_size() % cut.line_bytes for width, tensor in zip(widths, tensors)):
        rows *= 2
    # Two tiles are in flight for every wide tensor, and one holds zeros of its type.
    wide = sum(width * rows > _SMALL.value for width in widths)
    tile = cut.tile_bytes
    while cut.local_bytes and 3 * wide * tile > cut.local_bytes:
        tile //= 2
    return {"ROWS": rows, "TILE": tile}


def _aligned(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether 16-byte accesses may start at every tensor. Only GPUs care; Ascend needs no second variant."""
    return tensors[0].device.type == "cuda" and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _fill_up(values: list, count: int, filler: object) -> list:
    return values + [filler] * (count - len(values))


_GATHER_STATES_ARGS = (
    "rows_ptr",
    "num_rows",
    *(f"source{i}_ptr" for i in range(_MAX_GATHERED)),
    *(f"target{i}_ptr" for i in range(_MAX_GATHERED)),
)


@triton.jit(do_not_specialize=_GATHER_STATES_ARGS)
def _gather_states_kernel(
    rows_ptr,
    num_rows,
    source0_ptr,
    source1_ptr,
    source2_ptr,
    source3_ptr,
    source4_ptr,
    source5_ptr,
    source6_ptr,
    source7_ptr,
    target0_ptr,
    target1_ptr,
    target2_ptr,
    target3_ptr,
    target4_ptr,
    target5_ptr,
    target6_ptr,
    target7_ptr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    W4: tl.constexpr,
    W5: tl.constexpr,
    W6: tl.constexpr,
    W7: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    for item in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * PARTS, tl.num_programs(0)):
        # Narrow tensors fit one tile, so one part moves them; another one for each, beside its share of the wide ones.
        part = item % PARTS
        low = item // PARTS * ROWS
        count = tl.minimum(num_rows - low, ROWS)
        # Kept rows are mostly one run, as padding rows are; then the block moves at once, else row by row.
        first = tl.load(rows_ptr + low)
        stride = tl.where(first >= 0, 1, 0)
        breaks = count * 0
        for i in range(1, count):
            breaks += tl.where(tl.load(rows_ptr + low + i) == first + i * stride, 0, 1)
        run = tl.where(breaks == 0, count, 1)
        for i in range(0, count, run):
            row = tl.load(rows_ptr + low + i)
            at = low + i
            if row >= 0:
                _copy_rows(source0_ptr, target0_ptr, row, at, run, part, W0, ROWS, PARTS, TILE, ALIGNED)
                _copy_rows(source1_ptr, target1_ptr, row, at, run, (part + 1) % PARTS, W1, ROWS, PARTS, TILE, ALIGNED)
                _copy_rows(source2_ptr, target2_ptr, row, at, run, (part + 2) % PARTS, W2, ROWS, PARTS, TILE, ALIGNED)
                _copy_rows(source3_ptr, target3_ptr, row, at, run, (part + 3) % PARTS, W3, ROWS, PARTS, TILE, ALIGNED)
                _copy_rows(source4_ptr, target4_ptr, row, at, run, (part + 4) % PARTS, W4, ROWS, PARTS, TILE, ALIGNED)
                _copy_rows(source5_ptr, target5_ptr, row, at, run, (part + 5) % PARTS, W5, ROWS, PARTS, TILE, ALIGNED)
                _copy_rows(source6_ptr, target6_ptr, row, at, run, (part + 6) % PARTS, W6, ROWS, PARTS, TILE, ALIGNED)
                _copy_rows(source7_ptr, target7_ptr, row, at, run, (part + 7) % PARTS, W7, ROWS, PARTS, TILE, ALIGNED)
            else:
                _zero_rows(target0_ptr, at, run, part, W0, ROWS, PARTS, TILE, ALIGNED)
                _zero_rows(target1_ptr, at, run, (part + 1) % PARTS, W1, ROWS, PARTS, TILE, ALIGNED)
                _zero_rows(target2_ptr, at, run, (part + 2) % PARTS, W2, ROWS, PARTS, TILE, ALIGNED)
                _zero_rows(target3_ptr, at, run, (part + 3) % PARTS, W3, ROWS, PARTS, TILE, ALIGNED)
                _zero_rows(target4_ptr, at, run, (part + 4) % PARTS, W4, ROWS, PARTS, TILE, ALIGNED)
                _zero_rows(target5_ptr, at, run, (part + 5) % PARTS, W5, ROWS, PARTS, TILE, ALIGNED)
                _zero_rows(target6_ptr, at, run, (part + 6) % PARTS, W6, ROWS, PARTS, TILE, ALIGNED)
                _zero_rows(target7_ptr, at, run, (part + 7) % PARTS, W7, ROWS, PARTS, TILE, ALIGNED)


def gather_states(rows: torch.Tensor, states: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
    """``out[i][k] = states[i][rows[k]]``, zeros where ``rows[k]`` is ``PAD_ROW``; one launch for eight tensors.

    Args:
        rows: int64 ``[K]``, each a row of the states or ``PAD_ROW``, in any order; runs of consecutive rows, and of
            padding, are fast. ``K == 0`` launches nothing.
        states: tensors ``[T, ...]``, contiguous, of any dtype.
        out: tensors ``[>= K, ...]``, contiguous, same dtypes and row shapes; rows ``[0, K)`` are written, each
            element once.

    No output may alias an input or another output.

    Raises:
        ValueError: a tensor is not contiguous, or ``states`` and ``out`` do not match.
    """
    _check_pairs(states, out)
    num_rows = rows.numel()
    if num_rows == 0:
        return
    cut = tuning(rows.device)
    sources, widths = _as_rows(states, "states")
    targets, _ = _as_rows(out, "out")
    for at in range(0, len(sources), _MAX_GATHERED):
        some = slice(at, at + _MAX_GATHERED)
        shape = _cut_rows(cut, cut.gather_rows, targets[some], widths[some])
        items = _ceil_div(num_rows, shape["ROWS"]) * cut.gather_parts
        grid = (min(items, num_programs(rows.device)),)
        _launch(
            _gather_states_kernel,
            grid,
            rows.device,
            (
                rows,
                num_rows,
                *_fill_up(sources[some], _MAX_GATHERED, None),
                *_fill_up(targets[some], _MAX_GATHERED, None),
            ),
            (
                *_fill_up(widths[some], _MAX_GATHERED, 0),
                shape["ROWS"],
                cut.gather_parts,
                shape["TILE"],
                _aligned([*sources[some], *targets[some]]),
            ),
            tuple(source.dtype for source in sources[some]),
        )


_SCATTER_ROWS_ARGS = (
    "query_start_loc_ptr",
    "dropped_before_ptr",
    "num_reqs",
    "num_rows",
    "num_values",
    "search_steps",
    *(f"source{i}_ptr" for i in range(_MAX_SCATTERED)),
    *(f"target{i}_ptr" for i in range(_MAX_SCATTERED)),
)


@triton.jit(do_not_specialize=_SCATTER_ROWS_ARGS)
def _scatter_rows_kernel(
    query_start_loc_ptr,
    dropped_before_ptr,
    num_reqs,
    num_rows,
    num_values,
    search_steps,
    source0_ptr,
    source1_ptr,
    source2_ptr,
    source3_ptr,
    target0_ptr,
    target1_ptr,
    target2_ptr,
    target3_ptr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    for item in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * PARTS, tl.num_programs(0)):
        part = item % PARTS
        low = item // PARTS * ROWS
        high = tl.minimum(low + ROWS, num_rows)
        first, last = _request_span(query_start_loc_ptr, dropped_before_ptr, low, high, num_reqs, search_steps, False)
        # Kept runs are copied and the gaps between them, and behind the last boundary, are zeroed.
        done = low
        for r in range(first, last):
            begin = tl.load(query_start_loc_ptr + r)
            end = tl.load(query_start_loc_ptr + r + 1)
            shift = tl.load(dropped_before_ptr + r + 1)
            kept = begin + shift - tl.load(dropped_before_ptr + r)
            kept = tl.minimum(tl.maximum(kept, low), high)
            # The device may keep more rows than there are values; those rows are zero.
            end = tl.maximum(tl.minimum(tl.minimum(end, shift + num_values), high), kept)
            gap = kept - done
            _zero_rows(target0_ptr, done, gap, part, W0, ROWS, PARTS, TILE, ALIGNED)
            _zero_rows(target1_ptr, done, gap, part, W1, ROWS, PARTS, TILE, ALIGNED)
            _zero_rows(target2_ptr, done, gap, part, W2, ROWS, PARTS, TILE, ALIGNED)
            _zero_rows(target3_ptr, done, gap, part, W3, ROWS, PARTS, TILE, ALIGNED)
            run = end - kept
            _copy_rows(source0_ptr, target0_ptr, kept - shift, kept, run, part, W0, ROWS, PARTS, TILE, ALIGNED)
            _copy_rows(source1_ptr, target1_ptr, kept - shift, kept, run, part, W1, ROWS, PARTS, TILE, ALIGNED)
            _copy_rows(source2_ptr, target2_ptr, kept - shift, kept, run, part, W2, ROWS, PARTS, TILE, ALIGNED)
            _copy_rows(source3_ptr, target3_ptr, kept - shift, kept, run, part, W3, ROWS, PARTS, TILE, ALIGNED)
            done = end
        gap = high - done
        _zero_rows(target0_ptr, done, gap, part, W0, ROWS, PARTS, TILE, ALIGNED)
        _zero_rows(target1_ptr, done, gap, part, W1, ROWS, PARTS, TILE, ALIGNED)
        _zero_rows(target2_ptr, done, gap, part, W2, ROWS, PARTS, TILE, ALIGNED)
        _zero_rows(target3_ptr, done, gap, part, W3, ROWS, PARTS, TILE, ALIGNED)


def scatter_rows(
    values: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    *,
    query_start_loc: torch.Tensor,
    dropped_before: torch.Tensor,
) -> None:
    """Scatter compact rows into whole-step tensors and zero every other row, each element written once.

    One launch for four tensors. Rows of the step that no request owns (from ``query_start_loc[R]`` to ``T``) are
    zero, and so is a kept row for which there is no value.

    Args:
        values: tensors ``[>= K, ...]``, contiguous: final hidden states, then aux states.
        out: tensors ``[T, ...]``, contiguous, same dtypes and row shapes. ``T == 0`` launches nothing.
        query_start_loc: int32 ``[R + 1]``, device boundaries of the step, not decreasing.
        dropped_before: int32 ``[R + 1]``, rows left out before each boundary.

    No output may alias an input or another output.

    Raises:
        ValueError: a tensor is not contiguous, or ``values`` and ``out`` do not match.
    """
    _check_pairs(values, out)
    num_rows = out[0].shape[0] if out else 0
    if num_rows == 0:
        return
    cut = tuning(out[0].device)
    sources, widths = _as_rows(values, "values")
    targets, _ = _as_rows(out, "out")
    num_reqs = query_start_loc.numel() - 1
    for at in range(0, len(sources), _MAX_SCATTERED):
        some = slice(at, at + _MAX_SCATTERED)
        shape = _cut_rows(cut, cut.scatter_rows, targets[some], widths[some])
        items = _ceil_div(num_rows, shape["ROWS"]) * cut.scatter_parts
        grid = (min(items, num_programs(out[0].device)),)
        _launch(
            _scatter_rows_kernel,
            grid,
            out[0].device,
            (
                query_start_loc,
                dropped_before,
                num_reqs,
                num_rows,
                min(value.shape[0] for value in sources[some]),
                _search_steps(num_reqs),
                *_fill_up(sources[some], _MAX_SCATTERED, None),
                *_fill_up(targets[some], _MAX_SCATTERED, None),
            ),
            (
                *_fill_up(widths[some], _MAX_SCATTERED, 0),
                shape["ROWS"],
                cut.scatter_parts,
                shape["TILE"],
                _aligned([*sources[some], *targets[some]]),
            ),
            tuple(source.dtype for source in sources[some]),
        )


def _check_pairs(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} tensors cannot go into {len(targets)}")
    for i, (source, target) in enumerate(zip(sources, targets)):
        if source.dtype != target.dtype or source.shape[1:] != target.shape[1:]:
            raise ValueError(
                f"tensor {i}: rows of {source.dtype} {tuple(source.shape[1:])} cannot go into "
                f"rows of {target.dtype} {tuple(target.shape[1:])}"
            )


# -- replayed slots -------------------------------------------------------------------------------------------------

_PAD_REPLAYED_SLOTS_ARGS = (
    "slots_ptr",
    "slot_stride",
    "groups_ptr",
    "query_start_loc_ptr",
    "positions_ptr",
    "replay_start_ptr",
    "num_reqs",
    "window",
    "search_steps",
)


@triton.jit(do_not_specialize=_PAD_REPLAYED_SLOTS_ARGS)
def _pad_replayed_slots_kernel(
    slots_ptr,
    slot_stride,
    groups_ptr,
    query_start_loc_ptr,
    positions_ptr,
    replay_start_ptr,
    num_reqs,
    window,
    search_steps,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    pad = tl.full((BLOCK,), -1, tl.int64)
    low, high = _own_rows(tl.load(query_start_loc_ptr + num_reqs))
    first, last = _request_span(query_start_loc_ptr, query_start_loc_ptr, low, high, num_reqs, search_steps, False)
    for r in range(first, last):
        start = tl.load(replay_start_ptr + r)
        begin = tl.load(query_start_loc_ptr + r)
        end = tl.load(query_start_loc_ptr + r + 1)
        if (start > 0) & (end > begin):
            # Positions are consecutive inside a request, so the replayed rows are one range. A mask made of the
            # positions themselves would be lowered to a read-modify-write of whole blocks on Ascend.
            shift = begin - tl.load(positions_ptr + begin).to(tl.int32)
            replayed = tl.maximum(tl.maximum(begin, start + shift), low)
            stop = tl.minimum(tl.minimum(end, start + window + shift), high)
            for t in range(replayed, stop, BLOCK):
                live = lane < stop - t
                for i in tl.static_range(NUM_GROUPS):
                    group = tl.load(groups_ptr + i)
                    tl.store(slots_ptr + group * slot_stride + t + lane, pad, mask=live)


def pad_replayed_slots(
    slot_mappings: torch.Tensor,
    *,
    groups: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    replay_start: torch.Tensor,
    window: int,
) -> None:
    """Pad the slots of replayed tokens in the prefix-cacheable groups, in place.

    The rows of request ``r`` at positions ``[replay_start[r], replay_start[r] + window)`` rebuild window KV only;
    the cached KV of cacheable groups stays as it is. ``replay_start[r] == 0`` means no replay.

    Args:
        slot_mappings: int64 ``[G, >= T]``, last dimension contiguous, changed in place.
        groups: int32 ``[N]``, indices of the cacheable groups; ``N == 0`` launches nothing.
        query_start_loc: int32 ``[R + 1]``, device boundaries of the step.
        positions: int64 ``[>= T]``, consecutive inside a request.
        replay_start: int32 ``[R]``.
        window: positions replayed after a hit.
    """
    num_reqs = query_start_loc.numel() - 1
    num_rows = slot_mappings.shape[1]
    if num_reqs == 0 or num_rows == 0 or groups.numel() == 0:
        return
    cut = tuning(slot_mappings.device)
    _pad_replayed_slots_kernel[_table_grid(num_rows, slot_mappings.device)](
        slot_mappings,
        slot_mappings.stride(0),
        groups,
        query_start_loc,
        positions,
        replay_start,
        num_reqs,
        window,
        _search_steps(num_reqs),
        NUM_GROUPS=groups.numel(),
        BLOCK=cut.table_block,
        **dict(cut.options),
    )


# -- warm-up --------------------------------------------------------------------------------------------------------


def warm_up(
    *,
    positions: torch.Tensor,
    slot_mappings: torch.Tensor,
    rows: torch.Tensor,
    boundaries: torch.Tensor,
    kept_positions: torch.Tensor,
    kept_slot_mappings: torch.Tensor,
    states: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    kept_kv_start: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    num_programs: int | None = None,
) -> None:
    """Compile every kernel that this configuration can launch, on the buffers that it will be launched on.

    Run it at start-up, before anything is captured: each compilation takes a second or more. The number and types
    of the tensors are compiled in, their addresses, the batch and its size are not.

    Args:
        positions: int64 ``[>= 1]``, as for `gather_batch`; so are the next ones. The first padding row is written.
        slot_mappings: int64 ``[G, >= 1]``.
        rows: int64 ``[>= 1]``.
        boundaries: int32 ``[>= 2]``.
        kept_positions: int64 ``[>= 1]``.
        kept_slot_mappings: int64 ``[G, >= 1]``.
        states: tensors ``[>= 0, ...]`` with the types and row shapes of what `gather_states` will get, in its order.
        outputs: the same for `scatter_rows`.
        kept_kv_start: int32 ``[>= 1]``, if the gather will write it.
        groups: int32 ``[N]``, if slots of cacheable groups will be padded.
        num_programs: largest grid from now on, see `set_num_programs`; the device's cores decide if ``None``.
    """
    device = rows.device
    if num_programs is not None:
        set_num_programs(device.type, num_programs)

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    gather_batch(
        query_start_loc=zeros(2),
        dropped_before=zeros(2),
        requests=zeros(1),
        positions=positions,
        slot_mappings=slot_mappings,
        rows=rows,
        boundaries=boundaries,
        kept_positions=kept_positions,
        kept_slot_mappings=kept_slot_mappings,
        num_padded=1,
        kv_start=None if kept_kv_start is None else zeros(1),
        kept_kv_start=kept_kv_start,
    )
    if groups is not None:
        # Nothing is replayed, so no slot is touched.
        pad_replayed_slots(
            slot_mappings,
            groups=groups,
            query_start_loc=zeros(2),
            positions=positions,
            replay_start=zeros(1),
            window=1,
        )
    warm_up_states(states=states, outputs=outputs)


def warm_up_states(*, states: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Compile the gather of ``states`` and the scatter of ``outputs``; the part of `warm_up` that a forward knows.

    Args:
        states: tensors ``[>= 0, ...]`` with the types and row shapes of what `gather_states` will get, in its order.
        outputs: the same for `scatter_rows`.
    """
    device = states[0].device

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    def one_row(tensors: Sequence[torch.Tensor], offset: int) -> list[torch.Tensor]:
        """Rows like those of the tensors, ``offset`` elements off their alignment."""
        made = []
        for tensor in tensors:
            shape = (1, *tensor.shape[1:])
            made.append(tensor.new_empty(math.prod(shape) + offset)[offset:].view(shape))
        return made

    # Tensors off a 16-byte boundary take code of their own on a GPU.
    for offset in (0, 1) if device.type == "cuda" else (0,):
        gather_states(zeros(1).long(), one_row(states, offset), one_row(states, offset))
        scatter_rows(
            one_row(outputs, offset),
            one_row(outputs, offset),
            query_start_loc=zeros(2),
            dropped_before=zeros(2),
        )
