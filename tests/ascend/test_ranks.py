"""Several ranks over gloo: data parallelism with idle and disagreeing ranks, tensor parallelism against one rank."""

import json
import socket
import subprocess
import sys

import pytest
import torch

from tests.ascend.rank_process import Job, write
from tests.npu_emulator import ON_A5
from tests.npu_emulator.checks import TIE


def free_port():
    """A port with five free ones after it, as far as one can tell."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(job, folder):
    """Runs every rank of a job; returns their results by rank."""
    path = str(folder / f"{job.kind}{job.ranks}{job.replay}.json")
    write(job, path)
    command = [sys.executable, "-m", "tests.ascend.rank_process", path]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(job.ranks)]
    try:
        assert [p.wait(timeout=400) for p in ranks] == [0] * job.ranks
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
    results = []
    for rank in range(job.ranks):
        with open(f"{path}.{rank}") as file:
            results.append(json.load(file))
    return results


def test_data_parallel_ranks_agree(tmp_path):
    """Rank 1 decodes a short prompt and is idle afterwards, while rank 0 prefills: every layer meets its peers.

    In steps where nobody keeps a row the replay layers run nowhere; where only one rank does, the other adds a row.
    """
    prompts = [{"a": 1100, "b": 300}, {"c": 12}]
    first, second = run(Job(2, "dp", free_port(), prompts, steps=11), tmp_path)
    assert first["mismatches"] == second["mismatches"] == []
    assert not first["unfinished"]
    assert not second["unfinished"]
    for result in (first, second):
        for name, r in result["reports"].items():
            assert r["bounded"] <= TIE, (name, r)
            assert r["zero"]
            assert not r["nan"]
    assert first["late_rows"] == second["late_rows"]
    # Rank 1's prompt is short: it keeps all its rows in the first step, one decode row, then nothing.
    assert first["late_rows"][0] == [1, 12]
    assert first["kept"][0] == 0
    # Rank 1 is done after three steps and rank 0 keeps no row in its fourth and fifth: nobody runs the last layer.
    assert len(first["late_rows"]) == 11 - 2
    assert any(a > 1 and b == 1 for a, b in first["late_rows"])


@pytest.mark.skipif(ON_A5, reason="nothing here depends on the device: the A2 profile has it")
def test_data_parallel_ranks_run_the_bucket_of_the_largest(tmp_path):
    """Replay graphs: the rank with fewer kept rows, or none, or nothing to do at all, runs as many rows of padding."""
    sizes = (16, 64, 150)
    prompts = [{"a": 500, "b": 300}, {"c": 12}]
    job = Job(2, "dp", free_port(), prompts, steps=7, graph_sizes=",".join(map(str, sizes)))
    first, second = run(job, tmp_path)
    assert first["mismatches"] == second["mismatches"] == []
    for result in (first, second):
        assert not result["unfinished"]
        for name, r in result["reports"].items():
            assert (r["bounded"] <= TIE, r["zero"], r["nan"]) == (True, True, False), (name, r)
    assert first["late_rows"] == second["late_rows"]
    buckets = [rows for rows in first["late_rows"] if rows[0] == rows[1] and rows[0] in sizes]
    assert {a for a, _ in buckets} > {16}
    # A bucket is six pieces. Where only decodes ran there was no replay batch.
    assert first["replays"] == second["replays"] == 6 * len(buckets) > 12
    assert all(max(rows) <= 2 for rows in first["late_rows"] if rows not in buckets)


@pytest.mark.skipif(not ON_A5, reason="nothing here depends on the device: the A5 profile has it")
def test_data_parallel_ranks_draft_together(tmp_path):
    """The DSpark drafter's layers meet their peers too, also where a rank keeps no row or has nothing to do."""
    prompts = [{"a": 250, "b": 120}, {"c": 12}]
    first, second = run(Job(2, "dp", free_port(), prompts, steps=8, chunk=100, drafts=True), tmp_path)
    assert first["mismatches"] == second["mismatches"] == []
    for result in (first, second):
        assert not result["unfinished"]
        assert not result["draft_nan"]
        for name, r in result["reports"].items():
            assert (r["bounded"] <= TIE, r["zero"], r["nan"]) == (True, True, False), (name, r)
    assert 0 in first["kept"]
    assert first["draft_rows"] == second["draft_rows"]
    assert len(first["draft_rows"]) == 8


@pytest.mark.parametrize("keep", ["window"])
def test_tensor_parallel_equals_one_rank(tmp_path, keep):
    prompts = [{"a": 300, "b": 150}]
    weights = str(tmp_path / "weights")
    (alone,) = run(Job(1, "tp", 0, prompts, 0, keep=keep, weights=weights), tmp_path)
    together = run(Job(2, "tp", free_port(), prompts, 0, keep=keep, weights=weights), tmp_path)
    assert any(0 <= k < 200 for k in alone["kept"])
    rows = torch.load(f"{weights}.1.0")
    for rank, result in enumerate(together):
        assert result == alone
        mine = torch.load(f"{weights}.2.{rank}")
        for name in rows:
            assert torch.equal(rows[name], mine[name])
