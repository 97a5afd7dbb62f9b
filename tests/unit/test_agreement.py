"""Ranks post one fixed shape and read the same answer."""

import threading

import pytest
import torch

from vllm_ascend_replay.agreement import agree, alone


class SumOverThreads:
    """An all-reduce of real ranks in threads; refuses shapes and dtypes that differ."""

    def __init__(self, ranks):
        self.ranks, self.posted = ranks, []
        self.barrier = threading.Barrier(ranks)

    def __call__(self, tensor):
        self.posted.append(tensor.clone())
        self.barrier.wait(5)
        assert len({(t.shape, t.dtype) for t in self.posted}) == 1
        total = torch.stack(self.posted).sum(0).to(tensor.dtype)
        self.barrier.wait(5)
        tensor.copy_(total)


def run(posts):
    reduce, out = SumOverThreads(len(posts)), [None] * len(posts)

    def rank(i):
        out[i] = agree(*posts[i], rank=i, ranks=len(posts), all_reduce=reduce)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(len(posts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert all(a is not None for a in out)
    return out


@pytest.mark.parametrize(
    ("posts", "replays", "skips", "rows"),
    [
        ([(False, 5), (False, 0)], False, False, [5, 1]),
        ([(True, 128), (False, 0)], True, False, [128, 1]),  # an idle rank joins with one padding row
        ([(True, 0), (False, 0)], True, True, None),
        ([(True, 0), (True, 0), (False, 0)], True, True, None),
        ([(True, 0), (False, 3)], True, False, [1, 3]),  # decodes elsewhere keep rows: nobody skips
        ([(True, 0), (True, 7), (False, 2)], True, False, [1, 7, 2]),
    ],
)
def test_every_rank_reads_the_same(posts, replays, skips, rows):
    answers = run(posts)
    assert {a.replays for a in answers} == {replays}
    assert {a.skips for a in answers} == {skips}
    if rows is not None:
        assert {a.padded_rows() for a in answers} == {tuple(rows)}
    assert {a.rows for a in answers} == {tuple(n for _, n in posts)}


def test_alone():
    assert alone(True, 0).skips
    assert not alone(True, 3).skips
    assert not alone(False, 0).skips
