"""The exchange of kept rows: ranks over gloo against whole states, ownership against NumPy, and bytes on the wire."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.sharded.batches import named, random_batches
from vllm_ascend_replay.layouts import WHOLE, TokenShards, owned_rows, share_of, share_segments, transfers
from vllm_ascend_replay.plan import empty_plan, plan_replay

ROOT = Path(__file__).parents[2]
SIZES = (2, 3, 4, 8)


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """By size, what every rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    found = {}
    for size in SIZES:
        command = [sys.executable, "-W", "ignore", "-m", "tests.sharded.ranks", str(size), str(folder)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=300)
        found[size] = [json.loads((folder / f"{size}.{rank}.json").read_text()) for rank in range(size)]
    return found


@pytest.mark.parametrize("size", SIZES)
def test_exchanges_equal_whole_states_bit_for_bit(findings, size):
    for rank in findings[size]:
        assert rank["batches"] > 50
        assert rank["wrong"] == {}


def every_batch():
    return named() + random_batches(200, seed=1)


@pytest.mark.parametrize("size", SIZES)
def test_ownership_equals_counting_rows(size):
    without, crossing = 0, 0
    for batch in every_batch():
        if batch.moved:
            continue
        share = share_of(batch.num_rows, size)
        owned = owned_rows(batch.plan, batch.boundaries, share, size)
        rows = batch.rows().numpy()
        rows = rows[rows >= 0]
        owners = rows // share
        assert np.diff(owned).tolist() == np.bincount(owners, minlength=size).tolist()
        without += int((np.diff(owned) == 0).any())
        crossing += int(len(set(owners)) > 1)
        kept_share = share_of(batch.num_padded, size)
        matrix = np.zeros((size, size), dtype=int)
        np.add.at(matrix, (owners, np.arange(len(rows)) // kept_share), 1)
        for rank in range(size):
            send, receive = transfers(owned, kept_share, rank)
            assert send == matrix[rank].tolist()
            assert receive == matrix[:, rank].tolist()
    assert without > 20
    assert crossing > 20


def test_boundaries_that_moved_on_the_device_change_owners():
    """The control of the two ways: the host's counts are wrong for some batch whose decodes were resized."""
    wrong = 0
    for batch in every_batch():
        share, rows = share_of(batch.num_rows, 4), batch.rows().numpy()
        host = np.diff(owned_rows(batch.plan, batch.boundaries, share, 4))
        device = np.bincount(rows[rows >= 0] // share, minlength=4)
        assert batch.moved or (host == device).all()
        wrong += (host != device).any()
    assert wrong > 0


def test_whole_rows_pass_through():
    values = [torch.randn(5, 3), torch.randn(5)]
    assert WHOLE.collect(values, 5) == values
    assert WHOLE.shard(values[0]) is values[0]
    assert WHOLE.reduce(values[0]) is values[0]
    got = WHOLE.gather(values, torch.tensor([4, 0, -1]))
    assert torch.equal(got[0], torch.stack((values[0][4], values[0][0], torch.zeros(3))))


class Counting:
    """Ranks that count the bytes one of them sends to others and exchange nothing."""

    def __init__(self, rank, size):
        self.rank, self.size, self.sent = rank, size, 0

    def all_to_all(self, words, send, receive):
        assert words.shape == (sum(send),)
        self.sent += (sum(send) - send[self.rank]) * words.element_size()
        return words.new_empty(sum(receive)), lambda: None

    def all_gather(self, rows):
        self.sent += (self.size - 1) * rows.nbytes
        return rows.new_empty((self.size * rows.shape[0], *rows.shape[1:]))

    def reduce_scatter(self, rows):
        self.sent += (self.size - 1) * rows.nbytes // self.size
        return rows.new_empty((rows.shape[0] // self.size, *rows.shape[1:]))


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("way", ["host", "device"])
def test_bytes_on_the_wire(way, num_requests):
    """V4.1's sizes, TP 8: there and back, with three aux states, against gathering every state in full."""
    size, num_rows, kept, hidden, hc = 8, 16384, 128, 5120, 4
    query = np.diff(np.linspace(0, num_rows, num_requests + 1).astype(int))
    keep = np.diff(np.linspace(0, kept, num_requests + 1).astype(int))
    plans = [
        plan_replay(
            num_computed=[0],
            query_lens=[q],
            prefill_lens=[q],
            is_prefilling=[True],
            keeps_rows=[False],
            replay_start=[0],
            window=int(k),
        )
        for q, k in zip(query, keep)
    ]
    kept_lens = np.concatenate([p.kept_lens for p in plans])
    boundaries = np.concatenate(([0], np.cumsum(query)))
    plan = empty_plan(query)
    object.__setattr__(plan, "kept_lens", kept_lens)
    object.__setattr__(plan, "num_rows", int(kept_lens.sum()))
    assert plan.num_rows == kept
    share = share_of(num_rows, size)
    rows = torch.cat([torch.arange(end - k, end) for end, k in zip(boundaries[1:], kept_lens)]).to("meta")
    totals = {"kept": 0, "full": 0}
    for rank in range(size):
        # Shapes settle the bytes, so there is nothing behind the tensors.
        states = [
            torch.empty((share, hc, hidden), dtype=torch.bfloat16, device="meta"),
            torch.empty((share, hc), device="meta"),
            torch.empty(share, dtype=torch.int32, device="meta"),
        ]
        ranks = Counting(rank, size)
        shards = TokenShards(ranks)
        owned = owned_rows(plan, boundaries, share, size) if way == "host" else None
        streams, *_ = shards.gather(states, rows, owned)
        assert streams.shape[0] == kept // size
        shards.collect([streams[:, 0]], kept)
        shards.collect([streams[:, 0]] * 3, kept)
        totals["kept"] += ranks.sent
        full = Counting(rank, size)
        TokenShards(full).collect(states, num_rows)
        totals["full"] += full.sent
    # Each of the 8 x 2048 rows goes to seven others; a row is 40,980 bytes, packed in eights.
    assert totals["full"] == 7 * num_rows * (hc * hidden * 2 + hc * 4 + 8)
    assert totals["full"] >= 50 * totals["kept"], (totals, totals["full"] / totals["kept"])


# -- context parallelism -----------------------------------------------------------------------------------------------


def dual_chunks(query, prefilling, size):
    """Each rank's segments as vLLM's manager makes them.

    Decodes are on every rank and come first; of a prefill's ``2 size`` chunks rank ``r`` has the r-th from either end.
    """
    boundaries = np.concatenate(([0], np.cumsum(query)))
    ranks = []
    for rank in range(size):
        mine = []
        for i, q in enumerate(query):
            if not prefilling[i]:
                mine.append((i, boundaries[i], boundaries[i + 1]))
                continue
            chunk = -(-q // (2 * size))
            for c in (rank, 2 * size - 1 - rank):
                begin, end = min(c * chunk, q), min((c + 1) * chunk, q)
                if begin < end:
                    mine.append((i, boundaries[i] + begin, boundaries[i] + end))
        mine.sort(key=lambda s: (bool(prefilling[s[0]]), s[0], s[1]))
        ranks.append([tuple(map(int, s)) for s in mine])
    return boundaries, ranks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_segments_keep_their_rows(size):
    empty = 0
    rng = np.random.default_rng(size)
    for _ in range(150):
        n = int(rng.integers(1, 6))
        prefilling = np.sort(rng.random(n) < 0.6)
        query = np.where(prefilling, rng.integers(1, 70, n), rng.integers(1, 4, n))
        plan = plan_replay(
            num_computed=np.where(prefilling, 0, 40),
            query_lens=query,
            prefill_lens=np.where(prefilling, query + rng.integers(0, 30, n) * (rng.random(n) < 0.3), 40),
            is_prefilling=prefilling,
            keeps_rows=rng.random(n) < 0.2,
            replay_start=np.zeros(n, dtype=np.int32),
            window=8,
            policy=str(rng.choice(["final", "chunk"])),
        )
        boundaries, segments = dual_chunks(query, prefilling, size)
        kept = [row for i in range(n) for row in range(boundaries[i + 1] - plan.kept_lens[i], boundaries[i + 1])]
        shares = [share_segments(plan, boundaries, segments, rank) for rank in range(size)]
        gathered = []
        for rank, shared in enumerate(shares):
            local = shared.local
            # What a rank's own boundaries and `dropped_before` say, as the gather kernel reads them.
            lens = [end - begin for _, begin, end in segments[rank]] or [0]
            local_bounds = np.concatenate(([0], np.cumsum(lens)))
            assert local.dropped_before.tolist() == np.concatenate(([0], np.cumsum(lens - local.kept_lens))).tolist()
            rows_of = [row for _, begin, end in segments[rank] for row in range(begin, end)]
            ours = [rows_of[row] for end, k in zip(local_bounds[1:], local.kept_lens) for row in range(end - k, end)]
            assert local.num_rows == len(ours)
            requests = [request for request, _, _ in segments[rank]] or [0]
            assert local.kv_start.tolist() == plan.kv_start[requests].tolist()
            assert local.needs_replay == plan.needs_replay
            empty += not ours
            padded = len(shared.places) // size
            assert local.rows_to_run == (padded if kept else 0)
            assert (shared.places == shares[0].places).all()
            mine = shared.places[rank * padded : (rank + 1) * padded]
            assert [kept[place] for place in mine[: len(ours)]] == ours
            assert (mine[len(ours) :] == -1).all()
            gathered += ours + [None] * (padded - len(ours))
        # Ranks' rows, one rank after the other, restored to the whole batch's order.
        assert [gathered[at] for at in shares[0].restore] == kept
    assert empty > 5
