"""doctor: the server's reasons, the flags that open a gate, the saving, and what it says where things are missing."""

import builtins
import json
import sys

import pytest

from vllm_ascend_replay import support
from vllm_ascend_replay.cli import doctor
from vllm_ascend_replay.config import ReplaySettings
from vllm_ascend_replay.layer_plan import read_layer_plan

REFERENCE = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
# Gates that judge the model or the device, which no flag changes.
NO_FLAG = {"no-late-layer", "late-compression", "cut-index-source", "candidate-source", "late-engram", "device-graphs"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "vllm_ascend_replay")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)


def flat(text):
    return " ".join(text.replace("│", " ").split())


def test_every_gate_says_what_opens_it():
    gates = {gate.name for gate in (*support.GATES, *support.GRAPH_GATES)}
    assert gates - set(doctor.TURN_ON) - NO_FLAG == set()


def test_it_would_run(command, tiny_model):
    outcome = command("doctor", "--model", str(tiny_model), *REFERENCE, "--tokens", "129,5000", "--port", "9")
    assert outcome.status == 0, outcome.text
    assert outcome.text.startswith("Decoder replay would run.")
    report = outcome.report
    assert (report["runs"], report["reason"], report["host"]) == (True, None, "reference")
    assert "vllm_ascend_replay" in " ".join(report["plugins"])
    assert report["versions"]["vllm"].endswith("0.32.0")
    assert report["layer_plan"]["replay_layers"] == "5-8"
    features = {f["name"]: f for f in report["features"]}
    assert features["decoder replay"]["on"]
    assert features["replay graphs"]["reason"].startswith("--enforce-eager asks for no graphs")
    assert features["Prometheus counters"]["turn_on"].startswith("PROMETHEUS_MULTIPROC_DIR")
    assert report["kv_address"]["max_blocks"] == 2**32 // report["kv_address"]["page_stride_bytes"]
    short, long = report["saving"]
    assert (short["kept_rows"], short["layer_rows"], short["layer_rows_full"]) == (8, 129 * 5 + 8 * 4, 129 * 9)
    assert long["skipped_steps"] == long["steps"] - 1


def test_the_reason_comes_first_in_the_servers_words(command, tiny_model):
    """And it is what the server's own check says of the same configuration."""
    arguments = [*REFERENCE, "--enable-prefix-caching", "--enable-lora", "--enable-prompt-embeds"]
    outcome = command("doctor", "--model", str(tiny_model), *arguments)
    assert outcome.status == 1
    config = doctor.engine_config(["--model", str(tiny_model), *arguments])
    reason = support.unsupported_reason(config, None)
    assert outcome.report["reason"] == reason
    assert flat(outcome.text).startswith(f"Decoder replay would not run: {reason} also: prompt embeddings")
    assert outcome.report["features"][0]["turn_on"] == "without --enable-lora"


@pytest.mark.parametrize(
    ("variables", "arguments", "words"),
    [
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, [], "Model Runner V1 is in use; set VLLM_USE_V2_MODEL_RUNNER=1"),
        ({"ASCEND_REPLAY": "0"}, [], "it is switched off: ASCEND_REPLAY=0"),
        ({"ASCEND_REPLAY_KEEP": "3"}, [], "ASCEND_REPLAY_KEEP is 3"),
        ({"ASCEND_REPLAY_POLICY": "last"}, [], "ASCEND_REPLAY_POLICY is 'last'; allowed: final or chunk"),
        ({"VLLM_PLUGINS": "ascend"}, [], "add it: VLLM_PLUGINS=ascend,vllm_ascend_replay"),
        ({}, ["--no-swa-bounded-replay"], "it is switched off: --no-swa-bounded-replay"),
        ({}, ["--num-gpu-blocks-override", "2000000"], "exceed the 2**32 bytes"),
        ({}, ["--max-model-len", "999999999"], "vLLM refuses this configuration here"),
        ({}, ["--tensor-parallel-size", "0"], "ValidationError: tensor_parallel_size: Input should be greater than"),
        (
            {"ASCEND_REPLAY_GRAPH_SIZES": "9999"},
            ["--max-num-batched-tokens", "256"],
            "sizes up to max_num_batched_tokens, 256; 9999 is larger",
        ),
        ({"ASCEND_REPLAY_MIN_SAVED": "3000000000"}, [], "at most 2147483647"),
    ],
)
def test_reasons(command, tiny_model, monkeypatch, variables, arguments, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = command("doctor", "--model", str(tiny_model), *REFERENCE, *arguments)
    assert outcome.status == 1
    assert words in outcome.report["reason"], outcome.text


@pytest.mark.parametrize("text", ["{broken", "[1, 2]", "null"])
def test_a_broken_config_is_a_reason(command, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    outcome = command("doctor", "--model", str(tmp_path), *REFERENCE)
    assert outcome.status == 1
    assert f"the config.json of {tmp_path} cannot be read" in flat(outcome.text)


def test_another_model(command, tmp_path):
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**values, "hidden_size": 64, "num_attention_heads": 4}))
    outcome = command("doctor", "--model", str(tmp_path), *REFERENCE)
    assert outcome.status == 1
    assert "it is not a DeepSeek-V4.1 model" in outcome.report["reason"]


def test_without_a_model(command):
    outcome = command("doctor")
    assert outcome.status == 1
    assert "no model was named" in outcome.report["reason"]


def test_without_vllm_the_layers_are_read_all_the_same(command, tiny_model, monkeypatch):
    import importlib.util

    real_find, real_import = importlib.util.find_spec, builtins.__import__

    def find(name, *rest):
        return None if name in ("vllm", "vllm_ascend", "torch", "torch_npu") else real_find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)

    def guarded(name, *args, **kwargs):
        if name.split(".")[0] in ("vllm", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    outcome = command("doctor", "--model", str(tiny_model / "config.json"), "--tensor-parallel-size", "2")
    assert outcome.status == 1
    assert outcome.report["reason"].startswith("vLLM is not installed")
    assert outcome.report["layer_plan"]["cut"] == 5
    assert len(outcome.report["saving"]) == 3
    assert "torch is not installed" in outcome.report["device"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no/such/model"], "there is no no/such/model"),
        (["--enforce-eager"], "engine arguments need --model"),
        (["--tokens", "many"], "no list of positive whole numbers"),
        (["--json", "no/such/dir/x.json"], "there is no directory"),
    ],
)
def test_bad_arguments(command, arguments, words):
    from typer.testing import CliRunner

    from vllm_ascend_replay.cli import app

    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 2
    assert words in flat(result.output)


def test_arguments_that_vllm_does_not_know(command, tiny_model, capfd):
    outcome = command("doctor", "--model", str(tiny_model), "--no-such-flag")
    assert outcome.status == 2


@pytest.mark.parametrize("keep", ["window", "exact"])
@pytest.mark.parametrize("policy", ["final", "chunk"])
def test_expected_saving_by_hand(policy, keep):
    if policy == "chunk" and keep == "exact":
        pytest.skip("they exclude each other")
    from vllm_ascend_replay.reference.config import PRESETS, ReferenceConfig

    plan = read_layer_plan(ReferenceConfig(**PRESETS["v41-flash-plan"]))
    saving = doctor.expected_saving(plan, ReplaySettings(policy=policy, keep=keep), 16384, chunk=4096)
    kept = {"final": {"window": 128, "exact": 2414}, "chunk": {"window": 4 * 128}}[policy][keep]
    assert saving.kept_rows == kept
    assert saving.layer_rows == 16384 * 20 + kept * 20
    assert saving.layer_rows_full == 16384 * 40
    assert (saving.steps, saving.skipped_steps) == (4, 3 if policy == "final" else 0)


def test_cann_version(tmp_path):
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler/version.info").write_text("Version=9.0.0\nversion_dir=x\n")
    assert doctor.cann_version({"ASCEND_HOME_PATH": str(tmp_path)}) == "9.0.0"
    assert doctor.cann_version({"ASCEND_TOOLKIT_HOME": str(tmp_path / "none")}).endswith("version unknown")
    assert doctor.cann_version({}) is None


def test_the_command_is_cheap_to_import():
    """Shell completion and --help must not wait for torch."""
    import subprocess

    heavy = "torch", "vllm", "transformers", "httpx", "matplotlib", "triton"
    code = f"import sys, vllm_ascend_replay.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
