"""doctor on vllm-ascend's configuration: its reasons are those of the host."""

import json

import pytest

typer = pytest.importorskip("typer")

from typer.testing import CliRunner  # noqa: E402

from tests.npu_emulator import tiny  # noqa: E402
from vllm_ascend_replay import ascend  # noqa: E402
from vllm_ascend_replay.cli import app, doctor  # noqa: E402

ARGUMENTS = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--language-model-only"]
ARGUMENTS += ["--dtype", "bfloat16", "--block-size", "128", "--max-model-len", "2048"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_config(tmp_path_factory.mktemp("model"))


def run(tmp_path, model, *arguments):
    file = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["doctor", "--model", str(model), *ARGUMENTS, *arguments, "--json", str(file)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output, json.loads(file.read_text())


def test_it_would_run(tmp_path, model, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    status, output, report = run(tmp_path, model)
    assert status == 0, output
    assert report["host"] == "ascend"
    assert report["layer_plan"]["cut"] == 4
    assert any(line.endswith("vllm_ascend_replay") for line in report["plugins"])


def test_the_reason_is_the_hosts(tmp_path, model, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    status, output, report = run(tmp_path, model, "--enable-prompt-embeds")
    assert status == 1
    config = doctor.engine_config(["--model", str(model), *ARGUMENTS, "--enable-prompt-embeds"])
    assert report["reason"] == ascend.off_reason(config)
    assert report["reason"] in " ".join(output.split())
