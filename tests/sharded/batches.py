"""Batches of every kind for the exchange of kept rows: what the host planned, what the device has, and the states."""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_ascend_replay.plan import ReplayPlan, empty_plan, identity_plan, plan_replay


@dataclass
class Batch:
    """One step of ``T`` rows."""

    name: str
    plan: ReplayPlan
    boundaries: np.ndarray
    """int ``[R + 1]``, the host's."""
    device_boundaries: np.ndarray
    """int ``[R + 1]``; the host's, unless decodes were resized on the device."""
    num_padded: int
    """``N``, rows of the replay batch."""

    @property
    def num_rows(self) -> int:
        return int(self.boundaries[-1])

    @property
    def moved(self) -> bool:
        return bool((self.boundaries != self.device_boundaries).any())

    def rows(self) -> torch.Tensor:
        """int64 ``[N]``: step rows by the device's boundaries, as the gather kernel finds them; -1 on padding."""
        ends = self.device_boundaries[1:]
        kept = np.diff(self.device_boundaries - self.plan.dropped_before)
        rows = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, kept)])
        return torch.from_numpy(np.concatenate((rows, np.full(self.num_padded - len(rows), -1)))).long()

    def states(self, seed: int) -> list[torch.Tensor]:
        """Whole states of several dtypes; some floats are -0.0, infinite, or NaN of an uncommon kind."""
        g, rows = torch.Generator().manual_seed(seed), self.num_rows
        streams = torch.randn(rows, 4, 6, generator=g).bfloat16()
        streams[torch.rand(streams.shape, generator=g) < 0.1] = -0.0
        mix = torch.randn(rows, 4, generator=g)
        mix.view(torch.int32)[torch.rand(mix.shape, generator=g) < 0.05] = 0x7FC12345
        mix[torch.rand(mix.shape, generator=g) < 0.05] = float("-inf")
        ids = torch.randint(-(2**40), 2**40, (rows,), generator=g)
        topk = torch.randint(-1, 2**31 - 1, (rows, 1, 5), generator=g, dtype=torch.int32)
        return [streams, mix, ids, topk]


def _prefills(query, *, window=8, decodes=0, keeps=(), computed=0, policy="final"):
    """``decodes`` requests of one row, then prefills of ``query`` rows."""
    query = [1] * decodes + list(query)
    prefilling = np.arange(len(query)) >= decodes
    return np.array(query), plan_replay(
        num_computed=np.where(prefilling, computed, 50),
        query_lens=query,
        prefill_lens=np.where(prefilling, np.array(query) + computed, 50),
        is_prefilling=prefilling,
        keeps_rows=np.isin(np.arange(len(query)), keeps),
        replay_start=np.zeros(len(query), dtype=np.int32),
        window=window,
        policy=policy,
    )


def _batch(name, query, plan, *, extra=0, device_query=None):
    host = np.concatenate(([0], np.cumsum(query)))
    device = host if device_query is None else np.concatenate(([0], np.cumsum(device_query)))
    return Batch(name, plan, host, device, max(plan.num_rows, 1) + extra)


def named() -> list[Batch]:
    """One of each kind that goes wrong on its own."""
    short = np.array([3])
    return [
        _batch("one owner: all kept rows are the last rank's", *_prefills([61], window=5)),
        _batch("rows cross ranks", *_prefills([61, 17, 44], window=23)),
        _batch("one kept row in all", np.array([37]), _one_row(37, 36)),
        _batch("one kept row, the first", np.array([1, 36]), _one_row([1, 36], 0)),
        _batch("keeps every row", *_prefills([29, 61], keeps=(0,))),
        _batch("decodes mixed in", *_prefills([61, 33], decodes=5, window=7)),
        _batch("fewer rows than ranks", short, identity_plan(short, [0])),
        _batch("one row", np.array([1]), identity_plan([1], [0])),
        _batch("no kept row", np.array([13, 9]), empty_plan([13, 9])),
        _batch("no kept row of one", np.array([1]), empty_plan([1])),
        _batch("chunk policy", *_prefills([61, 18], policy="chunk", computed=16)),
        _batch("padding", *_prefills([61, 18], decodes=1), extra=6),
    ]


def _one_row(query, at):
    """A plan that keeps the last row of the request that ends with row ``at``."""
    query = np.atleast_1d(np.array(query))
    kept = (np.cumsum(query) == at + 1).astype(np.int32)
    dropped = np.concatenate(([0], np.cumsum(query - kept))).astype(np.int32)
    return ReplayPlan(kept, np.zeros(len(query), dtype=np.int32), dropped, 1, True)


def random_batches(count: int, seed: int = 0) -> list[Batch]:
    """Random schedules; in two thirds of them the device resized the decodes (up to three drafts each)."""
    rng, batches = np.random.default_rng(seed), []
    for number in range(count):
        n = int(rng.integers(1, 8))
        prefilling = rng.random(n) < 0.6
        prefilling.sort()
        query = np.where(prefilling, rng.integers(1, 90, n), rng.integers(1, 5, n))
        computed = np.where(prefilling, rng.integers(0, 50, n) * (rng.random(n) < 0.5), 60)
        plan = plan_replay(
            num_computed=computed,
            query_lens=query,
            prefill_lens=np.where(prefilling, computed + query + rng.integers(0, 30, n) * (rng.random(n) < 0.4), 60),
            is_prefilling=prefilling,
            keeps_rows=rng.random(n) < 0.15,
            replay_start=np.zeros(n, dtype=np.int32),
            window=8,
            policy=str(rng.choice(["final", "chunk"])),
            align=int(rng.choice([1, 4])),
        )
        device_query = None
        if number % 3 == 1:
            # Drafts that the device dropped: later rows move up.
            device_query = np.where(prefilling, query, rng.integers(1, query + 1))
        elif number % 3 == 2 and (~prefilling).sum() >= 2:
            # Rows change hands between decodes; the sum is the host's.
            device_query = query.copy()
            for _ in range(4):
                a, b = rng.choice(np.flatnonzero(~prefilling), 2, replace=False)
                if device_query[a] > 1:
                    device_query[a], device_query[b] = device_query[a] - 1, device_query[b] + 1
        batches.append(
            _batch(f"random {number}", query, plan, extra=int(rng.integers(0, 3)), device_query=device_query)
        )
    return batches
