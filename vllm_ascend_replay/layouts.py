"""How the tensors that cross the cut lie over a group of ranks, and how their kept rows change places.

Three ways a step's ``T`` rows lie over the tensor-parallel group:

* **whole** (`WholeRows`): every rank holds every row; nothing travels.
* **token-sharded** (`TokenShards`): under sequence parallelism rank ``r`` holds rows ``[r * C, (r + 1) * C)``,
  ``C = ceil(T / size)``; what lies beyond ``T`` is padding.
* **query rows** (`QueryRows`): under DSA context parallelism the rows of the attention's shared buffers (top-k
  indices, candidates, their lengths) lie in the same chunks, at the head of buffers of a fixed capacity.

The ``K`` kept rows lie over the group in the same way, in chunks of ``ceil(N / size)`` of the replay batch's ``N``
rows. Only kept rows travel, all states of a step in one exchange, as integers, which keeps every bit (a sum of floats
turns -0.0 into +0.0).

Who owns a kept row follows from the step's boundaries. Where the host's boundaries are the device's, every rank
computes the same counts on the host and sends what it owns to where it goes: a block for each rank, in which every
state's rows lie together, so that what comes from one rank is not copied again. Where the device may have moved the
boundaries (adaptive verification), only the device knows: every rank puts the rows it owns into zeros, side by side,
and the group adds them up. Both have shapes that all ranks know alike, and neither depends on anything that happens on
one rank.

Under prefill context parallelism every rank keeps the kept rows it has (`share_segments`); no state travels.

Knows no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from vllm_ascend_replay import kernels
from vllm_ascend_replay.plan import ReplayPlan

Counts = npt.NDArray[np.int64]


class Ranks(Protocol):
    """The ranks of a group, and what they exchange."""

    rank: int
    size: int

    def all_to_all(
        self, words: torch.Tensor, send: list[int], receive: list[int]
    ) -> tuple[torch.Tensor, Callable[[], object]]:
        """Words from every rank in rank order, ``[sum(receive)]``, there once the function beside them was called.

        Args:
            words: 1-D; the first ``send[0]`` of them go to rank 0, the next ``send[1]`` to rank 1, and so on.
            send: words for each rank.
            receive: words from each rank.
        """

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Everybody's rows in rank order, ``[size * rows, words]``."""

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's chunk of the sum over the ranks, ``[rows / size, words]``."""


class GroupRanks:
    """`Ranks` of a ``torch.distributed`` group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_to_all(
        self, words: torch.Tensor, send: list[int], receive: list[int]
    ) -> tuple[torch.Tensor, Callable[[], object]]:
        out = words.new_empty(sum(receive))
        work = dist.all_to_all_single(out, words, receive, send, group=self.group, async_op=True)
        return out, work.wait

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty((self.size * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(out, rows.contiguous(), group=self.group)
        return out

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty((rows.shape[0] // self.size, *rows.shape[1:]))
        dist.reduce_scatter_tensor(out, rows.contiguous(), group=self.group)
        return out


# -- ownership: NumPy, the same numbers on every rank ------------------------------------------------------------------


def share_of(num_rows: int, size: int) -> int:
    """Rows of each rank's chunk, padding included."""
    return -(-num_rows // size)


def owned_rows(plan: ReplayPlan, boundaries: npt.ArrayLike, share: int, size: int) -> Counts:
    """How many kept rows come before each rank's chunk of the step.

    Kept rows keep their order, so rank ``r`` owns the kept rows ``[owned[r], owned[r + 1])``.

    Args:
        plan: of the step's ``R`` requests.
        boundaries: int ``[R + 1]``, the step's boundaries.
        share: rows of a rank's chunk of the step.
        size: ranks.

    Returns:
        int64 ``[size + 1]``.
    """
    ends = np.asarray(boundaries, dtype=np.int64)[1:]
    edges = np.arange(size + 1, dtype=np.int64)[:, None] * share
    return np.clip(edges - (ends - plan.kept_lens), 0, plan.kept_lens).sum(1, dtype=np.int64)


def transfers(owned: Counts, share: int, rank: int) -> tuple[list[int], list[int]]:
    """Kept rows that ``rank`` sends to each rank, and receives from each, itself included.

    Args:
        owned: of `owned_rows`.
        share: rows of a rank's chunk of the replay batch.
        rank: this rank.
    """
    goes = np.minimum(np.arange(len(owned), dtype=np.int64) * share, owned[-1])
    send = np.minimum(owned[rank + 1], goes[1:]) - np.maximum(owned[rank], goes[:-1])
    receive = np.minimum(owned[1:], goes[rank + 1]) - np.maximum(owned[:-1], goes[rank])
    return np.maximum(send, 0).tolist(), np.maximum(receive, 0).tolist()


# -- rows of several states --------------------------------------------------------------------------------------------


_BLOCK_ALIGN = 64
"""Bytes to which each state's rows in a block are padded: operators read them there."""


def _block_words(states: Sequence[torch.Tensor], num_rows: int) -> int:
    """int64 words of a block of ``num_rows`` rows of all states, one state after the other."""
    return sum(-(-num_rows * _row_bytes(state) // _BLOCK_ALIGN) for state in states) * (_BLOCK_ALIGN // 8)


def _cut_block(block: torch.Tensor, states: Sequence[torch.Tensor], num_rows: int) -> list[torch.Tensor]:
    """Views ``[num_rows, ...]`` of a block (int64, 1-D), of the row shapes and dtypes of ``states``."""
    raw, views, begin = block.view(torch.uint8), [], 0
    for state in states:
        end = begin + num_rows * _row_bytes(state)
        views.append(raw[begin:end].view(state.dtype).view(num_rows, *state.shape[1:]))
        begin = end + -end % _BLOCK_ALIGN
    return views


def _select_rows(rows: torch.Tensor, states: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
    """``out[i][k] = states[i][rows[k]]``; on an accelerator in one launch."""
    if rows.device.type in ("cpu", "meta"):
        for state, target in zip(states, out):
            torch.index_select(state, 0, rows, out=target)
    else:
        kernels.gather_states(rows, [state.contiguous() for state in states], out)


_ALIGN = 8
"""Bytes to which columns of packed rows are padded, so that rows are copied in wide words."""


def _row_bytes(state: torch.Tensor) -> int:
    return state.shape[1:].numel() * state.element_size()


def _word(state: torch.Tensor) -> torch.dtype:
    """The widest integers that a row of ``state`` is made of."""
    size = _row_bytes(state)
    return torch.int64 if size % 8 == 0 else torch.int32 if size % 4 == 0 else torch.uint8


def _as_words(state: torch.Tensor) -> torch.Tensor:
    """``state [T, ...]`` as integers ``[T, words]``, without a copy if it is contiguous."""
    rows = state.contiguous().flatten(1) if state.ndim > 1 else state.contiguous().unsqueeze(1)
    if rows.stride(1) != 1:
        # One element may keep the stride of what it was cut from, and counts as contiguous.
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(_word(state))


def _columns(packed: torch.Tensor, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of each state's words in packed rows (uint8)."""
    columns, begin = [], 0
    for state in states:
        end = begin + _row_bytes(state)
        columns.append(packed[:, begin:end].view(_word(state)))
        begin = end + -end % _ALIGN
    return columns


def _new_packed(states: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
    """uint8 ``[num_rows, bytes]``; what is between the columns is never read."""
    width = sum(_row_bytes(state) + -_row_bytes(state) % _ALIGN for state in states)
    return states[0].new_empty((num_rows, width), dtype=torch.uint8)


def _pack(states: Sequence[torch.Tensor], rows: torch.Tensor | None = None) -> torch.Tensor:
    """Rows ``rows`` (int64 ``[k]``; default all) of all states side by side, int32 ``[k, words]``."""
    packed = _new_packed(states, states[0].shape[0] if rows is None else rows.shape[0])
    for state, column in zip(states, _columns(packed, states)):
        if rows is None:
            column.copy_(_as_words(state))
        else:
            torch.index_select(_as_words(state), 0, rows, out=column)
    return packed.view(torch.int32)


def _unpack(packed: torch.Tensor, like: Sequence[torch.Tensor], num_rows: int) -> list[torch.Tensor]:
    """Tensors ``[num_rows, ...]`` of the row shapes and dtypes of ``like``: the packed rows, then zeros.

    Args:
        packed: int32 ``[k, words]``; rows beyond ``num_rows`` are left out.
        like: tensors ``[C, ...]``.
        num_rows: rows of the results.
    """
    count = min(packed.shape[0], num_rows)
    states = []
    for state, column in zip(like, _columns(packed.view(torch.uint8), like)):
        out = state.new_empty((num_rows, *state.shape[1:]))
        words = _as_words(out)
        words[:count].copy_(column[:count])
        if count < num_rows:
            words[count:].zero_()
        states.append(out)
    return states


# -- layouts -----------------------------------------------------------------------------------------------------------


class Layout(Protocol):
    """Where the rows of the states that cross the cut are."""

    size: int
    """Ranks that hold the rows between them."""

    def gather(
        self, states: Sequence[torch.Tensor], rows: torch.Tensor, owned: Counts | None
    ) -> Sequence[torch.Tensor]:
        """This rank's chunk of the kept rows.

        Args:
            states: this rank's chunk of each state, tensors ``[C, ...]`` of any dtypes.
            rows: int64 ``[N]``, the step's row of each row of the replay batch; negative on padding, which comes last.
            owned: of `owned_rows`, where the host knows; else ``None``.

        Returns:
            Tensors ``[ceil(N / size), ...]``, zero on padding.
        """

    def collect(self, values: Sequence[torch.Tensor], num_rows: int) -> list[torch.Tensor]:
        """Whole tensors ``[num_rows, ...]`` from every rank's chunk ``[ceil(num_rows / size), ...]``."""

    def shard(self, value: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """This rank's chunk of a whole tensor ``[T, ...]``; rows beyond ``T`` are ``fill``."""

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """This rank's chunk of the sum of every rank's ``partial [T, ...]``."""


class WholeRows:
    """Every rank holds every row: nothing is exchanged."""

    size = 1

    def gather(
        self, states: Sequence[torch.Tensor], rows: torch.Tensor, owned: Counts | None = None
    ) -> Sequence[torch.Tensor]:
        keep = rows >= 0
        found = [state.index_select(0, rows.clamp_min(0)) for state in states]
        return [value.masked_fill_(~keep.view(-1, *[1] * (value.ndim - 1)), 0) for value in found]

    def collect(self, values: Sequence[torch.Tensor], num_rows: int) -> list[torch.Tensor]:
        return list(values)

    def shard(self, value: torch.Tensor, fill: float = 0) -> torch.Tensor:
        return value

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial


WHOLE = WholeRows()


class TokenShards:
    """Every rank holds one contiguous chunk of the rows, padded so that all chunks are as long."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.size = ranks, ranks.size

    def gather(
        self, states: Sequence[torch.Tensor], rows: torch.Tensor, owned: Counts | None = None
    ) -> list[torch.Tensor]:
        share = share_of(rows.shape[0], self.size)
        if owned is None:
            return _unpack(self.ranks.reduce_scatter(self._contribution(states, rows, share)), states, share)
        if not owned[-1]:
            return [state.new_zeros((share, *state.shape[1:])) for state in states]
        return self._exchange(states, rows, owned, share)

    def _exchange(
        self, states: Sequence[torch.Tensor], rows: torch.Tensor, owned: Counts, share: int
    ) -> list[torch.Tensor]:
        """The kept rows of this rank's chunk, where every rank knows who owns which."""
        rank = self.ranks.rank
        send, receive = transfers(owned, share, rank)
        mine = rows[int(owned[rank]) : int(owned[rank + 1])] - rank * states[0].shape[0]
        # Rows that stay are copied once, meanwhile, and are not part of the exchange.
        sent, received = (
            [0 if other == rank else _block_words(states, count) for other, count in enumerate(counts)]
            for counts in (send, receive)
        )
        outgoing = states[0].new_empty(sum(sent), dtype=torch.int64)
        for count, leave, block in zip(send, mine.split(send), outgoing.split(sent)):
            if block.numel():
                _select_rows(leave, states, _cut_block(block, states, count))
        arrived, wait = self.ranks.all_to_all(outgoing, sent, received)
        # Kept rows are in the order of their owners.
        if max(receive) == share and receive[rank] == 0:
            wait()
            return _cut_block(arrived, states, share)
        out = [state.new_empty((share, *state.shape[1:])) for state in states]
        begin = np.cumsum([0, *receive]).tolist()
        for state, target in zip(states, out):
            torch.index_select(state, 0, mine.split(send)[rank], out=target[begin[rank] : begin[rank + 1]])
            target[begin[-1] :].zero_()
        wait()
        for first, count, block in zip(begin, receive, arrived.split(received)):
            if block.numel():
                for target, values in zip(out, _cut_block(block, states, count)):
                    target[first : first + count].copy_(values)
        return out

    def _contribution(self, states: Sequence[torch.Tensor], rows: torch.Tensor, share: int) -> torch.Tensor:
        """The packed rows that this rank owns in their places, zeros elsewhere, ``[size * share, words]``.

        Every row has one owner, so the sum over the ranks is a move.
        """
        chunk = states[0].shape[0]
        at = rows - self.ranks.rank * chunk
        at = torch.nn.functional.pad(at, (0, self.size * share - at.shape[0]), value=-1)
        owns = (at >= 0) & (at < chunk)
        # A padding row is -1: for rank 0 too it is no row.
        return _pack(states, at.clamp(0, chunk - 1)).masked_fill_(~owns.unsqueeze(1), 0)

    def collect(self, values: Sequence[torch.Tensor], num_rows: int) -> list[torch.Tensor]:
        if len(values) == 0:
            return []
        if len(values) == 1:
            whole = self.ranks.all_gather(_as_words(values[0]))
            return [whole.view(values[0].dtype).view(-1, *values[0].shape[1:])[:num_rows]]
        return _unpack(self.ranks.all_gather(_pack(values)), values, num_rows)

    def shard(self, value: torch.Tensor, fill: float = 0) -> torch.Tensor:
        share = share_of(value.shape[0], self.size)
        begin = self.ranks.rank * share
        mine = value[begin : begin + share]
        missing = share - mine.shape[0]
        return mine if not missing else torch.cat((mine, mine.new_full((missing, *mine.shape[1:]), fill)))

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        missing = -partial.shape[0] % self.size
        if missing:
            partial = torch.cat((partial, partial.new_zeros((missing, *partial.shape[1:]))))
        return self.ranks.reduce_scatter(partial)


class QueryRows(TokenShards):
    """Buffers of a fixed capacity whose first rows are this rank's chunk: the rows of DSA-CP's queries."""

    def move(
        self, buffers: Sequence[torch.Tensor], num_rows: int, rows: torch.Tensor, owned: Counts | None = None
    ) -> None:
        """Put this rank's chunk of the kept rows where its chunk of the step's rows is.

        Args:
            buffers: tensors ``[capacity, ...]``, changed in place.
            num_rows: ``T``, rows of the step.
            rows: as for `gather`.
            owned: as for `gather`, for chunks of ``ceil(T / size)`` rows.
        """
        chunk = share_of(num_rows, self.size)
        for buffer, kept in zip(buffers, self.gather([buffer[:chunk] for buffer in buffers], rows, owned)):
            buffer[: kept.shape[0]].copy_(kept)


# -- prefill context parallelism ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedRows:
    """A batch's kept rows as ranks hold them that each have some segments of every request."""

    local: ReplayPlan
    """This rank's segments as requests; ``shared_rows`` are those of the fullest rank, ``N``."""
    places: Counts
    """int64 ``[size * N]``: which kept row of the whole batch each rank's rows are, rank after rank; -1: padding."""
    restore: Counts
    """int64 ``[K]``: where in ``places`` each kept row of the whole batch is found first."""


def share_segments(
    plan: ReplayPlan, boundaries: npt.ArrayLike, segments: Sequence[Sequence[tuple[int, int, int]]], rank: int
) -> SharedRows:
    """The kept rows of every rank's segments; no row changes its rank.

    A request's kept rows are its last ones, so those of a segment are the segment's last ones.

    Args:
        plan: of the whole batch of ``R`` requests.
        boundaries: int ``[R + 1]``, of the whole batch.
        segments: of each rank in the order of its rows: request, first row and end row in the whole batch. Requests
            that every rank has (decodes) are in all of them.
        rank: whose ``local`` plan to make.
    """
    ends = np.asarray(boundaries, dtype=np.int64)[1:]
    first = ends - plan.kept_lens
    before = np.concatenate(([0], np.cumsum(plan.kept_lens, dtype=np.int64)))
    # Per rank and segment: its rows' places among the kept rows of the whole batch.
    kept_places = [
        [
            np.arange(max(begin, first[request]), max(end, first[request]), dtype=np.int64)
            + (before[request] - first[request])
            for request, begin, end in mine
        ]
        for mine in segments
    ]
    num_padded = max(1, *(sum(map(len, mine)) for mine in kept_places))
    places = np.full(len(segments) * num_padded, -1, dtype=np.int64)
    restore = np.zeros(plan.num_rows, dtype=np.int64)
    # Backwards, so that of ranks that have the same row the first is left.
    for number in reversed(range(len(segments))):
        mine = np.concatenate([*kept_places[number], np.zeros(0, dtype=np.int64)])
        begin = number * num_padded
        places[begin : begin + len(mine)] = mine
        restore[mine] = begin + np.arange(len(mine))
    # A rank without segments has one request without rows, as vLLM's manager gives it.
    held = segments[rank] or [(0, 0, 0)]
    kept = np.array([len(at) for at in kept_places[rank]] or [0], dtype=np.int32)
    query = np.array([end - begin for _, begin, end in held], dtype=np.int32)
    local = replace(
        plan,
        kept_lens=kept,
        kv_start=plan.kv_start[[request for request, _, _ in held]],
        dropped_before=np.concatenate(([0], np.cumsum(query - kept))).astype(np.int32),
        num_rows=int(kept.sum()),
        shared_rows=num_padded if plan.num_rows else 0,
    )
    return SharedRows(local, places, restore)
