"""The CI jobs call nothing that does not exist, and what of the NPU job needs no NPU runs here."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*.yml")}
STEPS = [
    (name, line)
    for name, workflow in WORKFLOWS.items()
    for job in workflow["jobs"].values()
    for step in job["steps"]
    for line in step.get("run", "").replace("\\\n", " ").splitlines()
    if line.strip()
]
MAKE = "".join(path.read_text() for path in [ROOT / "Makefile", *ROOT.glob("mk/*.mk")])


def run(*words, **environ):
    return subprocess.run(
        words, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=900, check=False
    )


def test_the_jobs_are_there():
    assert {line for name, line in STEPS if name == "ci.yml"} == {"make test"}
    assert "make test-npu" in {line for name, line in STEPS if name == "npu.yml"}
    assert WORKFLOWS["npu.yml"]["jobs"]["acl-graphs"]["runs-on"] == ["self-hosted", "npu"]


@pytest.mark.parametrize(("name", "line"), STEPS, ids=[f"{name}: {line}" for name, line in STEPS])
def test_every_step_exists(name, line):
    match shlex.split(line):
        case ["make", target]:
            assert re.search(
                rf"^{target}:.*##", "".join(p.read_text() for p in [ROOT / "Makefile", *ROOT.glob("mk/*.mk")]), re.M
            )
        case ["vllm-ascend-replay", "doctor", "--model", "$NPU_MODEL", "--json", "doctor.json"]:
            pass  # tests/cli/test_doctor.py
        case ["python3", "-m", "pip", "install", *requirements]:
            # The released vllm-ascend is the one that everything else was tested with.
            pinned = (ROOT / "requirements/ascend-cpu.txt").read_text().splitlines()
            assert set(requirements) <= {".[plot]", "pytest", *(p for p in pinned if p.startswith("vllm-ascend=="))}
        case _:
            pytest.fail(f"{name} has a step that no test knows: {line}")


def test_npu_tests_are_found_and_say_what_they_need():
    done = run("make", "test-npu", f"NPU_PYTHON={sys.executable}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ skipped", done.stdout)
    assert "needs an Ascend NPU" in done.stdout


@pytest.mark.slow
def test_bench_npu_on_the_small_model(tiny_model, tmp_path):
    from vllm_ascend_replay.reference.engine import prepare_environment
    from vllm_ascend_replay.reference.server import REFERENCE_ARGUMENTS

    out = tmp_path / "comparison"
    done = run(
        *["make", "bench-npu", f"NPU_PYTHON={sys.executable}", f"NPU_MODEL={tiny_model}", f"NPU_OUT={out}"],
        f"NPU_SERVE_ARGS={shlex.join(REFERENCE_ARGUMENTS)}",
        "NPU_VERIFY_ARGS=--window 8 --lengths 9,129 --tokens 2 --vocab-size 97 --needle-tokens 0",
        "NPU_BENCH_ARGS=--tokens 129 --concurrency 1 --waves 1 --vocab-size 97",
        **{**prepare_environment({}), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((out / "verify.json").read_text())["passed"] is True
    assert len(json.loads((out / "bench.json").read_text())["ratios"]) == 1
    assert (out / "ttft.png").stat().st_size > 1000
    assert "decoder replay is running" in (out / "on.log").read_text()
    assert "decoder replay" not in (out / "off.log").read_text()


def test_devices_are_split():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from compare_servers import DEVICES, halves
    finally:
        sys.path.pop(0)
    assert halves("0,1,2,3") == [{DEVICES: "0,1"}, {DEVICES: "2,3"}]
    assert halves("") == halves("5") == [{}, {}]


def test_the_device_tests_engine_runs(tiny_model):
    """What the NPU tests use to run engines, on the small model."""
    from tests.npu.runs import run_engine, worst
    from vllm_ascend_replay.reference.engine import prepare_environment

    engine = {"model": str(tiny_model), "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
    engine |= {"dtype": "float32", "kv_cache_memory_bytes": 1 << 26}
    on = run_engine(engine, [[5, 9, 14] * 20], 2, **prepare_environment({}))
    assert on.stats[0]["replay_steps"] == 1
    assert "decoder replay is running" in on.log
    assert worst(on, on) == 0.0
