"""doctor on vllm-ascend's configuration, in a process of its own as a user runs it: its reasons are the host's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_emulator import ON_A5, tiny

pytest.importorskip("typer")

ROOT = Path(__file__).parents[2]
PLUGINS = "ascend,ascend_model,vllm_ascend_replay"
ARGUMENTS = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--language-model-only"]
ARGUMENTS += [
    "--dtype",
    "bfloat16",
    "--block-size",
    "128",
    "--max-model-len",
    "2048",
    "--max-num-batched-tokens",
    "512",
]
EMULATED = """
import os, sys
from tests.npu_emulator import activate
activate()
os.environ["VLLM_PLUGINS"] = sys.argv.pop(1)
from vllm_ascend_replay.cli import main
main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_config(tmp_path_factory.mktemp("model"), **tiny.DSPARK)


def doctor(tmp_path, model, *arguments, plugins=PLUGINS):
    """Exit status, output and report."""
    file = tmp_path / "report.json"
    command = [sys.executable, "-c", EMULATED, plugins, "doctor", "--model", model, *ARGUMENTS, *arguments]
    environ = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--json", str(file)], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert file.exists(), done.stdout + done.stderr
    return done.returncode, done.stdout, json.loads(file.read_text())


def test_it_would_run(tmp_path, model):
    drafts = json.dumps(tiny.DRAFTS["speculative_config"])
    status, output, report = doctor(tmp_path, model, "--speculative-config", drafts)
    assert status == 0, output
    assert (report["host"], report["reason"]) == ("ascend", None)
    assert report["layer_plan"]["cut"] == 4
    assert report["graphs"]["max_sizes_by_streams"] == 1800 // report["graphs"]["pieces_per_size"]
    kept = report["saving"][-1]["kept_rows"]
    assert kept == 16 if ON_A5 else 16 <= kept < 16 + 128
    caching = next(f for f in report["features"] if f["name"] == "prefix caching")
    assert (caching["on"], caching["reason"]) == (True, "hits are capped")


@pytest.mark.parametrize(
    ("arguments", "plugins", "words"),
    [
        (["--enable-prompt-embeds"], PLUGINS, "prompt embeddings are not supported; start without"),
        ([], "ascend,ascend_model", f"VLLM_PLUGINS leaves vllm_ascend_replay out; add it: VLLM_PLUGINS={PLUGINS}"),
    ],
)
def test_it_would_not(tmp_path, model, arguments, plugins, words):
    status, output, report = doctor(tmp_path, model, *arguments, plugins=plugins)
    assert status == 1
    assert report["reason"].startswith(words)
    assert f"Decoder replay would not run: {words}" in output
