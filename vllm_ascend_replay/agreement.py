"""Does any rank of the data-parallel group replay, and with how many rows? One CPU collective of a fixed shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Agreement:
    """What all ranks of the DP group know alike after the collective."""

    replays: bool
    """Some rank must run through a replay batch, so every rank does."""
    rows: tuple[int, ...]
    """Each rank's real kept rows."""

    @property
    def skips(self) -> bool:
        """No rank keeps a row: the replay layers do not run anywhere."""
        return self.replays and not any(self.rows)

    def padded_rows(self) -> tuple[int, ...]:
        """Rows each rank runs. A rank without kept rows adds one, for the collectives it owes."""
        return tuple(max(rows, 1) for rows in self.rows)


def alone(needs_replay: bool, num_rows: int) -> Agreement:
    """The agreement of a single rank."""
    return Agreement(needs_replay, (num_rows,))


def agree(
    needs_replay: bool, num_rows: int, *, rank: int, ranks: int, all_reduce: Callable[[torch.Tensor], object]
) -> Agreement:
    """Exchange ``[needs_replay, num_rows]`` over the DP group.

    Every rank must call it in the same steps; what is posted has the same shape and dtype whatever the batch is.

    Args:
        needs_replay: this rank has a bounded prefill.
        num_rows: this rank's real kept rows; 0 for a dummy batch.
        rank: this rank's index in the DP group.
        ranks: size of the DP group.
        all_reduce: sums an int32 ``[2, ranks]`` CPU tensor over the group in place.
    """
    posted = torch.zeros(2, ranks, dtype=torch.int32)
    posted[0, rank], posted[1, rank] = int(needs_replay), num_rows
    all_reduce(posted)
    flags, rows = posted.tolist()
    return Agreement(any(flags), tuple(rows))
