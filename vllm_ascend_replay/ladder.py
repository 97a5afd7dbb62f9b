"""Sizes of the replay graphs ("buckets"), in rows: pure functions, the same on every rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from vllm_ascend_replay.config import PREFIX, SettingError


def prompt_rows(keep_last: int, align: int = 1) -> int:
    """Most rows that one prompt keeps: ``F``, and up to ``align - 1`` more where the first row is rounded down."""
    return keep_last + align - 1


def default_sizes(
    *, window: int, keep_last: int, max_num_seqs: int, max_num_tokens: int, align: int = 1, multiple: int = 1
) -> list[int]:
    """The ladder: steps of the window, wider steps (1/8 of the power-of-two interval) further up.

    It begins at the window and reaches at least a prompt's rows beside a full batch of decodes, or 16 windows where
    that many prompts can end in one step. Larger replay batches are rare and run eagerly. A prompt that keeps more
    than the window has a size of its own: in the wide steps up there, a lone prompt would run many padding rows.

    Args:
        window: sliding window in tokens.
        keep_last: rows kept at a prompt's end, ``F >= window``.
        max_num_seqs: requests of a step.
        max_num_tokens: rows of a step.
        align: first kept rows are rounded down to a multiple of this.
        multiple: sizes are multiples of this (ranks that share the rows evenly).

    Returns:
        Ascending sizes, at most ``max_num_tokens``; empty if no multiple fits.
    """
    rows = prompt_rows(keep_last, align)
    upper = min(max_num_tokens, max(rows + max_num_seqs - 1, min(max_num_seqs * rows, 16 * window)))
    limit = max_num_tokens // multiple * multiple
    sizes = [window]
    while sizes[-1] < upper:
        sizes.append(sizes[-1] + max(window, 1 << max(sizes[-1].bit_length() - 4, 0)))
    if keep_last > window:
        sizes.append(rows)
    return sorted({min(-(-size // multiple) * multiple, limit) for size in sizes} - {0})


def fit_sizes(sizes: Sequence[int], limit: int | None, *, needed: int) -> list[int]:
    """At most ``limit`` of ``sizes``: the smallest and the largest stay, those between are thinned evenly.

    Args:
        sizes: ascending.
        limit: ``None`` for no limit.
        needed: rows of the most common replay batch. If only one size may stay it is the first that holds these.
    """
    count = len(sizes)
    if limit is None or count <= limit:
        return list(sizes)
    if limit <= 0:
        return []
    if limit == 1:
        return [sizes[min(bisect_left(sizes, needed), count - 1)]]
    return [sizes[i * (count - 1) // (limit - 1)] for i in range(limit)]


def max_buckets(*, streams: int | None, pieces: int, comm_groups: int = 0, used: int = 0) -> int | None:
    """Buckets that a device's stream budget allows; ``None``: any number.

    Every captured piece takes a stream of the device for good, communication takes 40 for each group and two more
    for each piece and group. A device that runs out fails start-up with error 207008.

    Args:
        streams: the device's budget; ``None`` where pieces cost nothing of the kind.
        pieces: captured pieces of one bucket.
        comm_groups: communication groups that the pieces use.
        used: pieces that the model's own graphs take.
    """
    if streams is None:
        return None
    per_piece = 1 + 2 * comm_groups
    return max((streams - 40 * comm_groups - used * per_piece) // (pieces * per_piece), 0)


def asked_sizes(compilation: Any, setting: Sequence[int]) -> tuple[str, list[int]]:
    """The sizes that a user asked for, and the name of what says so: vLLM's own option first."""
    flag = getattr(compilation, "decoder_replay_cudagraph_capture_sizes", None)
    # vLLM sorts the sizes of this kind that it is given.
    if flag:
        return "decoder_replay_cudagraph_capture_sizes", sorted(set(flag))
    return f"{PREFIX}_GRAPH_SIZES", list(setting)


def break_out_size(policy: str, compilation: Any, window: int) -> int:
    """Rows from which PIECEWISE model graphs break out to the replay batch: all of them under ``final``.

    Raises:
        SettingError: under ``chunk``, vLLM's threshold is not above the window.
    """
    if policy == "final":
        return 0
    threshold = getattr(compilation, "decoder_replay_trim_threshold", 768)
    if threshold <= window:
        raise SettingError(
            "decoder_replay_trim_threshold",
            threshold,
            f"more than the model's window, {window}: smaller steps have nothing to trim",
        )
    return int(threshold)


def check_sizes(name: str, sizes: Sequence[int], *, max_num_tokens: int, multiple: int = 1) -> list[int]:
    """Validate sizes that a user asked for.

    Raises:
        SettingError: sizes that are not positive, ascending and unique, exceed ``max_num_tokens`` (the message names
            the value), or are no multiples of ``multiple``.
    """
    found = ",".join(str(size) for size in sizes)
    rising = all(a < b for a, b in pairwise(sizes))
    if not sizes or min(sizes) <= 0 or not rising:
        raise SettingError(name, found, "positive numbers of rows, ascending, each once")
    if sizes[-1] > max_num_tokens:
        raise SettingError(name, found, f"sizes up to max_num_batched_tokens, {max_num_tokens}; {sizes[-1]} is larger")
    if uneven := [size for size in sizes if size % multiple]:
        raise SettingError(name, found, f"multiples of {multiple}, the ranks that share the rows; {uneven[0]} is none")
    return list(sizes)


def bucket_for(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of ascending ``sizes`` that holds ``rows``; ``None``: none does."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None
