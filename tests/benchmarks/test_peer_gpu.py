"""The peer benchmark runs on a CPU with tiny tensors; it checks its results itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.peer_gpu import SHAPES, missed_targets

ROOT = Path(__file__).resolve().parents[2]
PIECES = {"batch", "prepare", "gather", "head", "scatter", "seam"}


def test_every_piece_of_both_sides(tmp_path):
    command = [sys.executable, "-m", "benchmarks.peer_gpu", "--tiny", "--repeats", "1", "--json", tmp_path / "out.json"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    for row in json.loads((tmp_path / "out.json").read_text())["rows"]:
        assert set(row) >= PIECES
        assert all(row[piece][side]["host_us"] > 0 for piece in PIECES for side in ("vllm", "ours"))


def test_targets_are_what_the_seam_and_the_host_need():
    def row(seam_us: float, mib: float, host_us: float) -> dict:
        sides = {"vllm": {"host_us": 100.0}, "ours": {"host_us": host_us}}
        seam = {
            "vllm": {"device_us": 500.0, "extra_mib": 960.0},
            "ours": {"device_us": seam_us, "extra_mib": mib},
        }
        shape = {"tokens": SHAPES[-1].tokens, "requests": 1, "kept": 128}
        return {**shape, "batch": sides, "prepare": sides, "seam": seam}

    assert missed_targets([row(100.0, 240.0, 50.0)]) == []
    assert len(missed_targets([row(101.0, 240.0, 50.0)])) == 1
    assert len(missed_targets([row(100.0, 241.0, 50.0)])) == 1
    assert len(missed_targets([row(100.0, 240.0, 51.0)])) == 1
