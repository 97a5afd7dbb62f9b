"""Compares what a session remembered with the dense oracle."""

from dataclasses import dataclass

import torch

from .oracle import Oracle

TIE = 2.0**-6
"""One rounding tie of a BF16 value near four: the most a correct run may differ from the oracle."""

_memo: dict = {}
_oracles: dict = {}


def dense(text, ids, floors=None):
    """Dense rows float64 [n, H] of a sequence; `floors` int64 [n] bounds the windows of layers after the cut."""
    floors = None if floors is None or not bool(floors.any()) else floors
    key = (id(text), tuple(ids), None if floors is None else tuple(floors.tolist()))
    if key not in _memo:
        oracle = _oracles.setdefault(id(text), Oracle(text))
        _memo[key] = oracle(ids, floors)
    return _memo[key]


def forget():
    """Drops remembered dense rows: call when a model goes away (its id may come back)."""
    _memo.clear()
    _oracles.clear()


@dataclass
class Report:
    """Largest differences of one request's rows; NaN where a row is NaN."""

    bounded: float
    """Kept rows against the dense model with the same window starts."""
    last: float
    """Last prompt row against the unbounded dense model."""
    decodes: float
    """Decode rows against the unbounded dense model over the same tokens."""
    kept: int
    """Kept prompt rows."""
    zero: bool
    """Every row that was not kept came back as exact zeros."""
    nan: bool
    """Some row is NaN."""


def _worst(diff):
    if diff.isnan().any():
        return float("nan")
    return diff.max().item() if diff.numel() else 0.0


def _larger(a, b):
    """max that NaN always wins."""
    return float("nan") if a != a or b != b else max(a, b)


def report(session, name) -> Report:
    """Compares a request with both dense models.

    A preempted request computes positions again, with another window start: each (re)start is compared by itself,
    with the window starts that its own rows had. Positions it found cached are at or below every window start of that
    restart, so their own starts do not matter.
    """
    trace, text = session.traces[name], session.rank.text
    bounded, last, decodes, kept, zero, nan = 0.0, 0.0, 0.0, 0, True, False
    for epoch in range(len(trace.hits)):
        rows = [r for r in trace.rows if r.epoch == epoch]
        if not rows:
            continue
        pos, got, floor, keep = (
            torch.cat([getattr(r, k) for r in rows]) for k in ("positions", "hidden", "floor", "keep")
        )
        n, got = int(pos.max()) + 1, got.double()
        floors = torch.zeros(n, dtype=torch.long)
        floors[pos] = floor
        want, full = dense(text, trace.ids[:n], floors)[pos], dense(text, trace.ids[:n])[pos]
        diff, full_diff = (got - want).abs().amax(-1), (got - full).abs().amax(-1)
        prompt = pos < trace.prompt
        zero = zero and bool((got[~keep] == 0).all())
        nan = nan or bool(got.isnan().any())
        kept = max(kept, int((keep & prompt).sum()))
        bounded = _larger(bounded, _worst(diff[keep]))
        last = _larger(last, _worst(full_diff[pos == trace.prompt - 1]))
        decodes = _larger(decodes, _worst(full_diff[~prompt & keep]))
    return Report(bounded, last, decodes, kept, zero, nan)
