"""Which rows does each request keep, and from where do its late layers hold window KV?

Pure NumPy: the same numbers on every rank, no device, no state between steps.

Notation of one step: ``c`` computed tokens, ``q`` scheduled tokens, ``s = c + q``, ``P`` prefill length, ``W`` window,
``F`` rows to keep at a prompt's end, ``rs`` first position that a prefix hit replays on the encoder side (0: none).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

POLICIES = ("final", "chunk")

# Of the arrays' type: NumPy takes twice as long for a Python number.
_ZERO = np.zeros((), dtype=np.int32)


@dataclass(frozen=True)
class ReplayPlan:
    """The kept rows of one step of ``R`` requests."""

    kept_lens: Int32Array
    """``[R]`` rows each request keeps: its last ones in the step. May be 0."""
    kv_start: Int32Array
    """``[R]`` first position of which the late layers hold (or will hold) the request's window KV."""
    dropped_before: Int32Array
    """``[R + 1]`` rows left out before each request boundary of the step."""
    num_rows: int
    """Kept rows in all."""
    needs_replay: bool
    """Whether some prefilling request must run through the replay batch."""
    shared_rows: int = 0
    """Kept rows of the fullest of the ranks that share the batch's rows (context parallelism); 0: they do not."""

    @property
    def rows_to_run(self) -> int:
        """Rows that this rank runs: as many as the fullest of those it shares the batch with."""
        return max(self.num_rows, self.shared_rows)

    @property
    def requests(self) -> Int32Array:
        """``[R']`` the requests that keep a row, ascending."""
        return self.kept_lens.nonzero()[0].astype(np.int32)


def exact_rows(num_late_layers: int, window: int) -> int:
    """Rows to keep so that the first token and every decode equal a run without replay.

    A late layer spreads the error of a missing row over the next ``window - 1`` positions, so the last row is exact
    once ``num_late_layers * (window - 1)`` rows stand before it: F = 1 + n_late * (W - 1). The *first* late layer
    reads streams that are exact on all kept rows, hence no term for the cut layer itself.
    """
    return 1 + num_late_layers * (window - 1)


def first_kept(prefill_lens: npt.ArrayLike, keep_last: int, align: int = 1) -> Int32Array:
    """``begin``: the first position that a prompt of ``prefill_lens`` tokens keeps under ``final``, int32 ``[R]``."""
    begin = np.maximum(np.asarray(prefill_lens, dtype=np.int32) - np.int32(keep_last), _ZERO)
    return begin if align == 1 else begin // align * align


def bounded_prefills(
    *,
    prefill_lens: npt.ArrayLike,
    keeps_rows: npt.ArrayLike,
    replay_start: npt.ArrayLike,
    keep_last: int,
    min_saved: int = 1,
    align: int = 1,
) -> BoolArray:
    """``[R]`` prompts that ``final`` bounds. It does not depend on the chunk, so it never changes while prefilling."""
    return _saves(first_kept(prefill_lens, keep_last, align), keeps_rows, replay_start, min_saved)


def _saves(begin: Int32Array, keeps_rows: npt.ArrayLike, replay_start: npt.ArrayLike, min_saved: int) -> BoolArray:
    """``[R]`` whether keeping the rows from ``begin`` on saves enough of them."""
    saved = begin - np.asarray(replay_start, dtype=np.int32)
    return ~np.asarray(keeps_rows, dtype=bool) & (saved >= np.int32(max(min_saved, 1)))


def plan_replay(
    *,
    num_computed: npt.ArrayLike,
    query_lens: npt.ArrayLike,
    prefill_lens: npt.ArrayLike,
    is_prefilling: npt.ArrayLike,
    keeps_rows: npt.ArrayLike,
    replay_start: npt.ArrayLike,
    window: int,
    keep_last: int | None = None,
    policy: str = "final",
    min_saved: int = 1,
    align: int = 1,
) -> ReplayPlan:
    """Decide the kept rows of one step.

    Args:
        num_computed: ``[R]`` tokens computed before the step.
        query_lens: ``[R]`` tokens of the step.
        prefill_lens: ``[R]`` tokens to prefill; a resumed request counts what it had generated.
        is_prefilling: ``[R]`` bool.
        keeps_rows: ``[R]`` bool, every row of the request is read (prompt log-probabilities).
        replay_start: ``[R]`` first position a prefix hit replays on the encoder side, 0 without one.
        window: sliding window ``W`` in tokens.
        keep_last: ``F`` under ``final``; ``None`` means the window.
        policy: ``"final"`` keeps rows at positions ``>= P - F`` in every chunk; ``"chunk"`` the last ``W`` prompt
            rows of every chunk. Rows beyond the prompt (drafts) are kept by both.
        min_saved: rows that a prompt must save to be bounded (``final`` only).
        align: first kept positions are rounded down to a multiple of this, for hosts that can only start a window
            at a KV block.

    Raises:
        ValueError: unknown policy, ``keep_last < window``, or a non-positive window or alignment.
    """
    keep = window if keep_last is None else keep_last
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; allowed are {', '.join(POLICIES)}")
    if window < 1 or align < 1:
        raise ValueError(f"window ({window}) and align ({align}) must be positive")
    if keep < window:
        raise ValueError(f"keep_last is {keep}; it must be at least the window, {window}")
    # Few requests, so that every call of NumPy costs more than its work: some are spared here.
    computed, query = np.asarray(num_computed, dtype=np.int32), np.asarray(query_lens, dtype=np.int32)
    prefilling, start = np.asarray(is_prefilling, dtype=bool), np.asarray(replay_start, dtype=np.int32)
    if policy == "final":
        begin = first_kept(prefill_lens, keep, align)
        bounded = prefilling & _saves(begin, keeps_rows, start, min_saved)
    else:
        # Drafts behind the prompt may be rejected; the window of the next row still reaches W - 1 rows into the prompt.
        end = np.minimum(computed + query, np.asarray(prefill_lens, dtype=np.int32))
        begin = first_kept(end, window, align)
        bounded = prefilling & ~np.asarray(keeps_rows, dtype=bool) & (query > window) & (begin > computed)
    # Who is not bounded keeps every row, from position 0 on.
    begin = begin * bounded
    dropped = np.minimum(np.maximum(begin - computed, _ZERO), query)
    kept = query - dropped
    dropped_before = np.zeros(len(query) + 1, dtype=np.int32)
    np.add.accumulate(dropped, out=dropped_before[1:])
    return ReplayPlan(
        kept_lens=kept,
        kv_start=np.maximum(begin, start),
        dropped_before=dropped_before,
        num_rows=sum(kept.tolist()),
        needs_replay=bool(np.count_nonzero(bounded)),
    )


def identity_plan(query_lens: npt.ArrayLike, replay_start: npt.ArrayLike) -> ReplayPlan:
    """Every request keeps every row (a rank that only joins the others' replay)."""
    query = np.asarray(query_lens, dtype=np.int32)
    return ReplayPlan(
        kept_lens=query,
        kv_start=np.asarray(replay_start, dtype=np.int32),
        dropped_before=np.zeros(len(query) + 1, dtype=np.int32),
        num_rows=int(query.sum()),
        needs_replay=False,
    )


def empty_plan(query_lens: npt.ArrayLike) -> ReplayPlan:
    """No row is kept: an idle rank's dummy batch, whose rows nobody reads."""
    query = np.asarray(query_lens, dtype=np.int32)
    zeros = np.zeros(len(query), dtype=np.int32)
    dropped_before = np.zeros(len(query) + 1, dtype=np.int32)
    np.cumsum(query, out=dropped_before[1:])
    return ReplayPlan(zeros, zeros, dropped_before, 0, False)


def lowers_into_unwritten(
    *,
    num_computed: npt.ArrayLike,
    prefill_lens: npt.ArrayLike,
    bounded: npt.ArrayLike,
) -> bool:
    """Whether running every row through the late layers would touch window KV that nobody wrote.

    That is so while a bounded prompt is prefilled anywhere but in its very last token: the tail ``c + 1 = P`` reads
    only ``[P - W, P - 1]``, which is written by then.
    """
    before_tail = np.asarray(num_computed) + 1 < np.asarray(prefill_lens)
    return bool((np.asarray(bounded, dtype=bool) & before_tail).any())
