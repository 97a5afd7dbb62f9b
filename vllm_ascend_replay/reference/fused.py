"""Triton kernels for what plain PyTorch would do in many passes over a step's rows or entries.

They compute what the modules that call them write out in PyTorch, on bfloat16 tensors of a GPU; float32 and float64
models, and CPUs, keep PyTorch's own. Sums are float32 and rounded once, so a result may differ in its last bit.
No launch waits for the device or has a shape that depends on its data.
"""

from __future__ import annotations

import functools

import torch
from vllm.triton_utils import tl, triton

_DIGIT = tl.constexpr(256)


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels are used for ``x``."""
    return x.is_cuda and x.dtype == torch.bfloat16


def _block(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())


# -- hyper-connections ----------------------------------------------------------------------------------------------


@triton.jit
def _collapse_norm_kernel(  # type: ignore[no-untyped-def]  # Triton types the arguments.
    streams_ptr,  # [T, HC, WIDTH]
    mix_ptr,  # [T, HC]
    weight_ptr,  # [WIDTH]
    out_ptr,  # [T, WIDTH]
    EPS: tl.constexpr,
    HC: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    x = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(HC):
        stream = tl.load(streams_ptr + (row * HC + i) * WIDTH + at, mask=mask, other=0.0)
        x += tl.load(mix_ptr + row * HC + i).to(tl.float32) * stream.to(tl.float32)
    x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / WIDTH + EPS) * tl.load(weight_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + row * WIDTH + at, x.to(out_ptr.dtype.element_ty), mask=mask)


def collapse_norm(streams: torch.Tensor, mix: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms_norm(collapse(streams [T, hc, H], mix [T, hc]), weight [H], eps)``, ``[T, H]``."""
    num_rows, hc, width = streams.shape
    out = streams.new_empty((num_rows, width))
    if num_rows:
        _collapse_norm_kernel[(num_rows,)](
            *(streams.contiguous(), mix.contiguous(), weight, out),
            EPS=eps,
            HC=hc,
            WIDTH=width,
            BLOCK=_block(width),
            num_warps=8,
        )
    return out


@triton.jit
def _spread_kernel(  # type: ignore[no-untyped-def]
    y_ptr,  # [T, WIDTH]
    streams_ptr,  # [T, HC, WIDTH]
    post_ptr,  # [T, HC]
    comb_ptr,  # [T, HC, HC]
    out_ptr,  # [T, HC, WIDTH]
    HC: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    y = tl.load(y_ptr + row * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    for j in tl.static_range(HC):
        mixed = tl.load(post_ptr + row * HC + j) * y
        for i in tl.static_range(HC):
            # The loads of the other rounds come from the cache.
            stream = tl.load(streams_ptr + (row * HC + i) * WIDTH + at, mask=mask, other=0.0)
            mixed += tl.load(comb_ptr + (row * HC + i) * HC + j) * stream.to(tl.float32)
        tl.store(out_ptr + (row * HC + j) * WIDTH + at, mixed.to(out_ptr.dtype.element_ty), mask=mask)


def spread(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """`HyperConnection.spread`."""
    num_rows, hc, width = streams.shape
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if num_rows:
        block = min(_block(width), 1024)
        _spread_kernel[(num_rows, triton.cdiv(width, block))](
            *(y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous(), out),
            HC=hc,
            WIDTH=width,
            BLOCK=block,
        )
    return out


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / WIDTH + EPS) * tl.load(weight_ptr + at, mask=at < WIDTH, other=0.0)
    tl.store(out_ptr + row * WIDTH + at, x.to(out_ptr.dtype.element_ty), mask=at < WIDTH)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weights.rms_norm` of ``[T, d]``."""
    num_rows, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_rows:
        _rms_norm_kernel[(num_rows,)](x.contiguous(), weight, out, EPS=eps, WIDTH=width, BLOCK=_block(width))
    return out


@triton.jit
def _project_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, WIDTH]
    fn_ptr,  # [COUNT, WIDTH]
    out_ptr,  # [splits, T, LINE]
    num_rows,
    part,  # columns of one split, a multiple of BLOCK_K
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    LINE: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, LINE)
    k = tl.arange(0, BLOCK_K)
    begin = tl.program_id(1) * part
    total = tl.zeros([BLOCK_M, LINE], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for first in range(begin, tl.minimum(begin + part, WIDTH), BLOCK_K):
        at = first + k
        x = tl.load(
            x_ptr + row[:, None].to(tl.int64) * WIDTH + at[None, :],
            mask=(row < num_rows)[:, None] & (at < WIDTH)[None, :],
            other=0.0,
        )
        fn = tl.load(
            fn_ptr + column[None, :] * WIDTH + at[:, None],
            mask=(column < COUNT)[None, :] & (at < WIDTH)[:, None],
            other=0.0,
        )
        if x_ptr.dtype.element_ty == tl.bfloat16:
            # The weights as a sum of two, so that their products with the exact rows are as good as float32.
            high = fn.to(tl.bfloat16)
            total = tl.dot(x, high, total)
            total = tl.dot(x, (fn - high.to(tl.float32)).to(tl.bfloat16), total)
        else:
            total += tl.dot(x, fn)
        if SQUARES:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
    if SQUARES:
        total = tl.where(column[None, :] == COUNT, squares[:, None], total)
    out = out_ptr + (tl.program_id(1) * num_rows + row[:, None]).to(tl.int64) * LINE + column[None, :]
    tl.store(out, total, mask=(row < num_rows)[:, None] & (column >= 0)[None, :])


def project(x: torch.Tensor, fn: torch.Tensor, *, squares: bool = False) -> torch.Tensor:
    """Parts of ``x [T, width] @ fn.T``, as precise as ``fn``.

    Args:
        x: ``[T, width]``.
        fn: float32 ``[count, width]``.
        squares: whether the column after the product holds the rows' sums of squares.

    Returns:
        float32 ``[splits, T, line]``, to be summed over the splits; ``line >= count``.
    """
    (num_rows, width), count = x.shape, fn.shape[0]
    rows, columns = (64 if num_rows >= 4096 else 16), 128
    # Few rows give few programs, so they share out the columns.
    blocks = triton.cdiv(max(num_rows, 1), rows)
    splits = min(16, max(1, _block(1024 // blocks + 1) // 2), triton.cdiv(width, columns))
    part = triton.cdiv(triton.cdiv(width, splits), columns) * columns
    out = x.new_empty((splits, num_rows, _block(count + squares, 16)), dtype=torch.float32)
    if num_rows:
        _project_kernel[(blocks, splits)](
            *(x.contiguous(), fn, out, num_rows, part),
            COUNT=count,
            WIDTH=width,
            LINE=out.shape[2],
            SQUARES=squares,
            BLOCK_M=rows,
            BLOCK_K=columns,
        )
    return out


# -- rotation and pages ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _frequencies(device: torch.device, dim: int, theta: float) -> torch.Tensor:
    return theta ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, HEADS, DIM]
    positions_ptr,  # [T]
    frequencies_ptr,  # [PAIRS]
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_P)
    angle = tl.load(positions_ptr + row).to(tl.float64) * tl.load(frequencies_ptr + pair, mask=pair < PAIRS, other=0.0)
    cos, sin = tl.cos(angle).to(tl.float32)[None, :], tl.sin(angle).to(tl.float32)[None, :]
    if INVERSE:
        sin = -sin
    at = x_ptr + (row * HEADS + head[:, None]) * DIM + (DIM - 2 * PAIRS) + 2 * pair[None, :]
    mask = (head < HEADS)[:, None] & (pair < PAIRS)[None, :]
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + 1, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(at + 1, (a * sin + b * cos).to(x_ptr.dtype.element_ty), mask=mask)


def rotate(x: torch.Tensor, positions: torch.Tensor, dim: int, theta: float, *, inverse: bool = False) -> torch.Tensor:
    """`attention.Rotary` in place: the last ``dim`` of ``x``, ``[T, d]`` or ``[T, heads, d]``, contiguous."""
    assert x.is_contiguous()
    heads = x.shape[1] if x.ndim == 3 else 1
    if x.shape[0]:
        _rotate_kernel[(x.shape[0],)](
            *(x, positions, _frequencies(x.device, dim, theta)),
            HEADS=heads,
            DIM=x.shape[-1],
            PAIRS=dim // 2,
            INVERSE=inverse,
            BLOCK_H=_block(heads),
            BLOCK_P=_block(dim // 2),
        )
    return x


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]
    cache_ptr,
    slots_ptr,  # [T]
    values_ptr,  # [T, WIDTH]
    num_rows,
    states,
    block_stride,
    state_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
    mask = (slot >= 0)[:, None] & (at < WIDTH)[None, :]
    values = tl.load(values_ptr + row[:, None].to(tl.int64) * WIDTH + at[None, :], mask=mask, other=0.0)
    out = cache_ptr + ((slot // states) * block_stride + (slot % states) * state_stride)[:, None] + at[None, :]
    tl.store(out, values, mask=mask)


def store_rows(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """`cache.store_rows`."""
    num_rows, width = values.shape
    if num_rows:
        rows = 4
        _store_kernel[(triton.cdiv(num_rows, rows),)](
            *(cache, slots, values.contiguous(), num_rows, cache.shape[1], cache.stride(0), cache.stride(1)),
            WIDTH=width,
            BLOCK=_block(width),
            ROWS=rows,
        )


# -- attention ------------------------------------------------------------------------------------------------------


@triton.jit
def _fold(query, kv, valid, scale, best, total, acc):  # type: ignore[no-untyped-def]
    """One block of entries into the running softmax."""
    scores = tl.dot(query, tl.trans(kv)) * scale
    scores = tl.where(valid[None, :], scores, -float("inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp(scores - new_best[:, None])
    shrink = tl.exp(best - new_best)
    acc = acc * shrink[:, None] + tl.dot(weights.to(kv.dtype), kv)
    return new_best, total * shrink + tl.sum(weights, axis=1), acc


@triton.jit
def _entries(cache_ptr, table_ptr, entry, valid, states, block_stride, state_stride, at, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Entries ``[N, D]`` of one request's pages; zeros where not ``valid``."""
    page = tl.load(table_ptr + entry // states, mask=valid, other=0).to(tl.int64)
    start = page * block_stride + (entry % states) * state_stride
    return tl.load(cache_ptr + start[:, None] + at[None, :], mask=valid[:, None] & (at < DIM)[None, :], other=0.0)


@triton.jit
def _attend_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [T, HEADS, DIM]
    out_ptr,  # [T, HEADS, DIM]
    positions_ptr,  # [T]
    request_ptr,  # [T]
    real_ptr,  # [T]
    sink_ptr,  # [HEADS]
    start_ptr,  # [R]
    window_ptr,
    window_table_ptr,  # [R, window_pages]
    window_pages,
    window_states,
    window_block_stride,
    window_state_stride,
    chosen_ptr,  # [T, CHOSEN]
    source_ptr,
    source_table_ptr,  # [R, source_pages]
    source_pages,
    source_states,
    source_block_stride,
    source_state_stride,
    scale,
    HAS_START: tl.constexpr,
    WINDOW: tl.constexpr,
    CHOSEN: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mask = (head < HEADS)[:, None] & (at < DIM)[None, :]
    lane = (row * HEADS + head[:, None]) * DIM + at[None, :]
    query = tl.load(query_ptr + lane, mask=mask, other=0.0)
    request = tl.load(request_ptr + row)
    position = tl.load(positions_ptr + row)
    lowest = tl.maximum(position - WINDOW + 1, 0)
    if HAS_START:
        lowest = tl.maximum(lowest, tl.load(start_ptr + request).to(tl.int64))
    end = tl.where(tl.load(real_ptr + row) != 0, position + 1, 0)
    # The sink stands in the denominator only.
    best = tl.load(sink_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)
    total = tl.full([BLOCK_H], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    table = window_table_ptr + request * window_pages
    for first in range(0, WINDOW, BLOCK_N):
        entry = lowest + first + n
        valid = (entry < end) & (first + n < WINDOW)
        kv = _entries(window_ptr, table, entry, valid, window_states, window_block_stride, window_state_stride, at, DIM)
        best, total, acc = _fold(query, kv, valid, scale, best, total, acc)
    if CHOSEN > 0:
        table = source_table_ptr + request * source_pages
        for first in range(0, CHOSEN, BLOCK_N):
            entry = tl.load(chosen_ptr + row * CHOSEN + first + n, mask=first + n < CHOSEN, other=-1)
            valid = entry >= 0
            kv = _entries(
                source_ptr, table, entry, valid, source_states, source_block_stride, source_state_stride, at, DIM
            )
            best, total, acc = _fold(query, kv, valid, scale, best, total, acc)
    tl.store(out_ptr + lane, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def attend(
    query: torch.Tensor,
    out: torch.Tensor,
    *,
    positions: torch.Tensor,
    request: torch.Tensor,
    real: torch.Tensor,
    sink: torch.Tensor,
    kv_start: torch.Tensor | None,
    window: int,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    chosen: torch.Tensor | None = None,
    source_cache: torch.Tensor | None = None,
    source_table: torch.Tensor | None = None,
) -> None:
    """Attention of each row over its window and its chosen entries, straight from the pages.

    Args:
        query: ``[T, heads, dim]``; out: alike, filled.
        positions: int64 ``[T]``; request: int64 ``[T]``; real: bool ``[T]``; rows that are not get zeros.
        sink: ``[heads]``.
        kv_start: int32 ``[R]``, or ``None``.
        window: entries of a window.
        cache: pages ``[blocks, states, dim]`` of window KV; block_table: int32 ``[R, n]``.
        chosen: int32 ``[T, k]`` with -1 for none; source_cache, source_table: their pages. ``None`` without.
    """
    num_rows, heads, dim = query.shape
    if not num_rows:
        return
    if chosen is None or source_cache is None or source_table is None:
        chosen, source_cache, source_table, count = request, cache, block_table, 0
    else:
        count = chosen.shape[1]
    block = min(_block(heads, 16), 64)
    _attend_kernel[(num_rows, triton.cdiv(heads, block))](
        *(query, out, positions, request, real, sink, request if kv_start is None else kv_start),
        *(cache, block_table, block_table.stride(0), cache.shape[1], cache.stride(0), cache.stride(1)),
        *(chosen, source_cache, source_table, source_table.stride(0)),
        *(source_cache.shape[1], source_cache.stride(0), source_cache.stride(1), dim**-0.5),
        HAS_START=kv_start is not None,
        WINDOW=window,
        CHOSEN=count,
        HEADS=heads,
        DIM=dim,
        BLOCK_H=block,
        BLOCK_D=_block(dim, 16),
        BLOCK_N=min(64, _block(max(window, count), 16)),
    )


# -- choosing entries -----------------------------------------------------------------------------------------------


@triton.jit
def _score_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [T, HEADS, DIM]
    weight_ptr,  # [T, HEADS]
    scores_ptr,  # [tiles, SIZE, width]
    row_ptr,  # [tiles, SIZE]
    length_ptr,  # [tiles, SIZE]
    request_ptr,  # [tiles]
    keep_ptr,  # [tiles, SIZE, keep_blocks]
    keys_ptr,
    table_ptr,  # [R, pages]
    pages,
    states,
    block_stride,
    state_stride,
    width,
    keep_blocks,
    KEEP: tl.constexpr,  # entries in a block of `keep`; 0: every entry counts
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(1).to(tl.int64)
    m, at = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    length = tl.load(length_ptr + tile * SIZE + m, mask=m < SIZE, other=0)
    longest = tl.max(length)
    # What lies beyond is not read by anyone either.
    if tl.program_id(0) * BLOCK_N < longest:
        table = table_ptr + tl.load(request_ptr + tile) * pages
        keys = tl.trans(_entries(keys_ptr, table, entry, entry < longest, states, block_stride, state_stride, at, DIM))
        row = tl.load(row_ptr + tile * SIZE + m, mask=m < SIZE, other=0)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        inside = (m < SIZE)[:, None] & (at < DIM)[None, :]
        for head in range(HEADS):
            query = tl.load(query_ptr + (row[:, None] * HEADS + head) * DIM + at[None, :], mask=inside, other=0.0)
            weight = tl.load(weight_ptr + row * HEADS + head, mask=m < SIZE, other=0.0)
            total += tl.maximum(tl.dot(query, keys), 0.0) * weight[:, None]
        visible = entry[None, :] < length[:, None]
        line = tile * SIZE + m[:, None]
        if KEEP > 0:
            visible &= tl.load(keep_ptr + line * keep_blocks + (entry // KEEP)[None, :], mask=visible, other=0) != 0
        total = tl.where(visible, total, -float("inf"))
        tl.store(scores_ptr + line * width + entry[None, :], total, mask=(m < SIZE)[:, None] & (entry < width)[None, :])


def score(
    query: torch.Tensor,
    weight: torch.Tensor,
    *,
    row: torch.Tensor,
    lengths: torch.Tensor,
    request: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    width: int,
    keep: torch.Tensor | None = None,
    keep_block: int = 0,
) -> torch.Tensor:
    """Index scores ``sum_h weight_h * relu(query_h . key)`` of tiles of rows against their request's entries.

    Args:
        query: ``[T, heads, dim]``; weight: float32 ``[T, heads]``.
        row: int64 ``[tiles, size]``, a tile's rows of the batch; lengths: int64, alike: entries that a row sees.
        request: int64 ``[tiles]``.
        cache: pages ``[blocks, states, dim]`` of index keys; block_table: int32 ``[R, n]``.
        width: entries of the longest row at most.
        keep: bool ``[tiles, size, blocks]``: blocks of ``keep_block`` entries that count; ``None``: all do.

    Returns:
        float32 ``[tiles * size, width]``: ``-inf`` where an entry does not count; undefined beyond a row's length.
    """
    (tiles, size), (heads, dim) = row.shape, query.shape[1:]
    scores = weight.new_empty((tiles * size, width))
    rows = _block(size, 16)
    block = min(_block(width, 16), 128)
    _score_kernel[(triton.cdiv(width, block), tiles)](
        *(query, weight, scores, row, lengths, request, lengths if keep is None else keep, cache, block_table),
        *(block_table.stride(0), cache.shape[1], cache.stride(0), cache.stride(1), width),
        0 if keep is None else keep.shape[-1],
        KEEP=0 if keep is None else keep_block,
        SIZE=size,
        HEADS=heads,
        DIM=dim,
        BLOCK_M=rows,
        BLOCK_D=_block(dim, 16),
        BLOCK_N=block,
    )
    return scores


@triton.jit
def _best_of_blocks_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,  # [T, width]
    length_ptr,  # [T]
    best_ptr,  # [T, blocks]
    width,
    blocks,
    SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block, s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_S)
    length = tl.load(length_ptr + row)
    entry = block[:, None] * SIZE + s[None, :]
    mask = (entry < length) & (s < SIZE)[None, :]
    best = tl.max(tl.load(scores_ptr + row * width + entry, mask=mask, other=-float("inf")), axis=1)
    best = tl.where(block == (length - 1) // SIZE, float("inf"), best)
    tl.store(best_ptr + row * blocks + block, best, mask=block < blocks)


def best_of_blocks(scores: torch.Tensor, lengths: torch.Tensor, block: int) -> torch.Tensor:
    """The best score of each block of ``block`` entries, ``+inf`` for the newest: float32 ``[T, blocks]``.

    Args:
        scores: float32 ``[T, width]``; lengths: int64 ``[T]``.
    """
    num_rows, width = scores.shape
    best = scores.new_empty((num_rows, triton.cdiv(width, block)))
    size = 256
    _best_of_blocks_kernel[(num_rows, triton.cdiv(best.shape[1], size))](
        *(scores, lengths, best, width, best.shape[1]), SIZE=block, BLOCK_S=_block(block), BLOCK=size
    )
    return best


@triton.jit
def _ordered(values):  # type: ignore[no-untyped-def]
    """float32 as uint32 of the same order; both zeros are one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _choose_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,  # [T, width]
    length_ptr,  # [T]
    out_ptr,  # [T, K]
    width,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(length_ptr + row).to(tl.int32)
    line = scores_ptr + row * width
    n, digits = tl.arange(0, BLOCK), tl.arange(0, _DIGIT)
    # The K-th best score, digit by digit from the top: `left` of the scores that begin with `prefix` are chosen.
    left = tl.full([], K, tl.int32)
    prefix = tl.full([], 0, tl.uint32)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([_DIGIT], tl.int32)
        for first in range(0, length, BLOCK):
            entry = first + n
            values = tl.load(line + entry, mask=entry < length, other=-float("inf"))
            key = _ordered(values)
            counted = values > -float("inf")
            if step > 0:
                counted &= (key >> (shift + 8)) == prefix
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), _DIGIT, mask=counted)
        if step == 0:
            left = tl.minimum(left, tl.sum(counts))
        from_top = tl.cumsum(counts, axis=0, reverse=True)
        digit = tl.max(tl.where(from_top >= left, digits, 0))
        left -= tl.sum(tl.where(digits > digit, counts, 0))
        prefix = (prefix << 8) | digit.to(tl.uint32)
    # All better ones and, among equals, the first `left`, in rising order.
    taken = tl.full([], 0, tl.int32)
    equals = tl.full([], 0, tl.int32)
    for first in range(0, length, BLOCK):
        entry = first + n
        values = tl.load(line + entry, mask=entry < length, other=-float("inf"))
        key = _ordered(values)
        counted = values > -float("inf")
        equal = counted & (key == prefix)
        rank = equals + tl.cumsum(equal.to(tl.int32), axis=0)
        chosen = (counted & (key > prefix)) | (equal & (rank <= left))
        place = taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(out_ptr + row * K + place, entry, mask=chosen)
        taken += tl.sum(chosen.to(tl.int32))
        equals += tl.sum(equal.to(tl.int32))
    k = tl.arange(0, BLOCK_K)
    tl.store(out_ptr + row * K + k, tl.full([BLOCK_K], -1, tl.int32), mask=(k >= taken) & (k < K))


def choose(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` best entries of each row in rising order; among equals the lower entry wins.

    Args:
        scores: float32 ``[T, width]``, no NaN; ``-inf`` is never chosen. lengths: int64 ``[T]``, entries to look at.

    Returns:
        int32 ``[T, k]``, -1 at the end where there are fewer.
    """
    num_rows, width = scores.shape
    out = torch.empty((num_rows, k), dtype=torch.int32, device=scores.device)
    block = min(2048, _block(width, 16))
    _choose_kernel[(num_rows,)](
        *(scores, lengths, out, width), K=k, BLOCK_K=_block(k), BLOCK=block, num_warps=8 if block > 1024 else 4
    )
    return out


# -- experts --------------------------------------------------------------------------------------------------------


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [PARTS, T, LINE]
    bias_ptr,  # [EXPERTS]
    chosen_ptr,  # [T, K + 1]
    weight_ptr,  # [T, K + 1]
    count_ptr,  # [programs, EXPERTS + 1]
    num_rows,
    factor,
    PARTS: tl.constexpr,
    LINE: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, column = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = (row < num_rows)[:, None]
    mask = inside & (expert < EXPERTS)[None, :]
    x = tl.zeros([ROWS, BLOCK_E], tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * num_rows + row[:, None]).to(tl.int64) * LINE + expert[None, :]
        x += tl.load(logits_ptr + at, mask=mask, other=0.0)
    score = tl.sqrt(tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))))
    bias = tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0)
    ranked = tl.where(mask, score + bias[None, :], -float("inf"))
    # The shared expert stands last, with weight 1.
    chosen = tl.full([ROWS, BLOCK_K], EXPERTS, tl.int32)
    weights = tl.zeros([ROWS, BLOCK_K], tl.float32)
    count = tl.where(expert == EXPERTS, tl.sum((row < num_rows).to(tl.int32)), 0)
    for k in tl.static_range(K):
        best = tl.max(ranked, axis=1)
        at = tl.min(tl.where(ranked == best[:, None], expert[None, :], EXPERTS - 1), axis=1)
        hit = expert[None, :] == at[:, None]
        chosen = tl.where(column[None, :] == k, at[:, None], chosen)
        weights = tl.where(column[None, :] == k, tl.sum(tl.where(hit, score, 0.0), axis=1)[:, None], weights)
        count += tl.sum((hit & inside).to(tl.int32), axis=0)
        ranked = tl.where(hit, -float("inf"), ranked)
    weights = weights / (tl.sum(weights, axis=1)[:, None] + 1e-20) * factor
    weights = tl.where(column[None, :] == K, 1.0, weights)
    out = row[:, None] * (K + 1) + column[None, :]
    tl.store(chosen_ptr + out, chosen, mask=inside & (column <= K)[None, :])
    tl.store(weight_ptr + out, weights, mask=inside & (column <= K)[None, :])
    tl.store(count_ptr + tl.program_id(0) * (EXPERTS + 1) + expert, count, mask=expert <= EXPERTS)


@triton.jit
def _place_kernel(  # type: ignore[no-untyped-def]
    chosen_ptr,  # [T, K + 1]
    before_ptr,  # [programs, EXPERTS + 1]: rows of each expert up to and with this program's
    ends_ptr,  # [EXPERTS + 1]
    place_ptr,  # [T, K + 1]
    source_ptr,  # [T * (K + 1)]
    num_rows,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_E)
    inside = row < num_rows
    base = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert <= EXPERTS), other=0)
    line = before_ptr + (tl.program_id(0) - 1) * (EXPERTS + 1) + expert
    base += tl.load(line, mask=(expert <= EXPERTS) & (tl.program_id(0) > 0), other=0)
    for k in tl.static_range(K + 1):
        chosen = tl.load(chosen_ptr + row * (K + 1) + k, mask=inside, other=-1)
        hit = (expert[None, :] == chosen[:, None]).to(tl.int32)
        place = tl.sum(hit * (base[None, :] + tl.cumsum(hit, axis=0) - 1), axis=1)
        tl.store(place_ptr + row * (K + 1) + k, place, mask=inside)
        tl.store(source_ptr + place, row, mask=inside)
        base += tl.sum(hit, axis=0)


def route(
    logits: torch.Tensor, bias: torch.Tensor, k: int, factor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`MoE`'s routing, and the rows sorted by expert.

    Args:
        logits: float32 ``[parts, T, >= experts]``, summed over the parts; bias: float32 ``[experts]``.

    Returns:
        Weights float32 ``[T, k + 1]``, the shared expert's last; places int32 ``[T, k + 1]`` of the row's copies in
        the sorted order; source rows int32 ``[T * (k + 1)]`` in that order; ends int32 ``[experts + 1]``.
    """
    (parts, num_rows, line), experts = logits.shape, bias.shape[0]
    rows = 32
    programs = triton.cdiv(max(num_rows, 1), rows)
    chosen, place, source = (torch.empty((num_rows, k + 1), dtype=torch.int32, device=logits.device) for _ in range(3))
    weights = logits.new_empty((num_rows, k + 1))
    counts = torch.empty((programs, experts + 1), dtype=torch.int32, device=logits.device)
    _route_kernel[(programs,)](
        *(logits, bias, chosen, weights, counts, num_rows, factor),
        PARTS=parts,
        LINE=line,
        EXPERTS=experts,
        K=k,
        BLOCK_E=_block(experts + 1),
        BLOCK_K=_block(k + 1),
        ROWS=rows,
    )
    before = counts.cumsum(0, dtype=torch.int32)
    ends = before[-1].cumsum(0, dtype=torch.int32)
    _place_kernel[(programs,)](
        *(chosen, before, ends, place, source, num_rows),
        EXPERTS=experts,
        K=k,
        BLOCK_E=_block(experts + 1),
        ROWS=rows,
    )
    return weights, place, source.flatten(), ends


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, out_ptr, count, limit, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.minimum(tl.load(gate_ptr + at, mask=at < count, other=0.0).to(tl.float32), limit)
    up = tl.load(up_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out_ptr + at, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=at < count)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``; may overwrite ``gate``. Contiguous, of one shape."""
    count, block = gate.numel(), 2048
    if count:
        _swiglu_kernel[(triton.cdiv(count, block),)](gate, up, gate, count, limit, BLOCK=block)
    return gate


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    y_ptr,  # [T * K, WIDTH]
    place_ptr,  # [T, K]
    weight_ptr,  # [T, K]
    out_ptr,  # [T, WIDTH]
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(place_ptr + row * K + k).to(tl.int64)
        y = tl.load(y_ptr + place * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        total += tl.load(weight_ptr + row * K + k) * y
    tl.store(out_ptr + row * WIDTH + at, total.to(out_ptr.dtype.element_ty), mask=at < WIDTH)


def combine(y: torch.Tensor, place: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum_k weights[t, k] * y[place[t, k]]``.

    Args:
        y: ``[T * k, H]``; place: int ``[T, k]``; weights: float32 ``[T, k]``.

    Returns:
        ``[T, H]`` in ``y``'s dtype.
    """
    (num_rows, k), width = place.shape, y.shape[1]
    out = y.new_empty((num_rows, width))
    if num_rows:
        block = min(_block(width), 1024)
        _combine_kernel[(num_rows, triton.cdiv(width, block))](y, place, weights, out, K=k, WIDTH=width, BLOCK=block)
    return out
