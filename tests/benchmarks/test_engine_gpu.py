"""The engine benchmark runs on a CPU with a tiny model, and its arms do what their names say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine_gpu import ARMS, TINY, missed_targets

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.engine
@pytest.mark.slow
def test_every_arm_on_every_case(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.engine_gpu",
        "--tiny",
        "--rounds",
        "1",
        "--json",
        tmp_path / "out.json",
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    report = json.loads((tmp_path / "out.json").read_text())
    results = report["results"]
    assert {name: set(rows) for name, rows in results.items()} == {name: set(ARMS) for name in TINY.cases}
    # Where policies keep the same rows they find the same tokens, in float32.
    assert len({str(results["30 x2"][name]["tokens"]) for name in ("final", "chunk", "vllm", "vllm-eager")}) == 1
    assert results["150"]["chunk"]["tokens"] == results["150"]["vllm"]["tokens"]
    assert results["150"]["exact"]["tokens"] == results["150"]["off"]["tokens"]
    assert results["150"]["off"]["steps"] == 3
    for name, case in TINY.cases.items():
        for row in results[name].values():
            assert len(row["tokens"][0]) == len(row["ttft_ms"][0]) == case.prompts
            assert row["ttft_p50_ms"] > 0


def test_a_slower_arm_is_a_missed_target():
    def rows(ours: float, theirs: float) -> dict:
        return {"final": {"ttft_p50_ms": ours}, "vllm": {"ttft_p50_ms": theirs}}

    assert missed_targets({"8K x8": rows(1.0, 1.0), "128K": rows(0.9, 1.0)}) == []
    assert len(missed_targets({"8K x8": rows(1.1, 1.0), "128K": rows(1.0, 1.0)})) == 2
