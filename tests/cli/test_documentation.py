"""Whatever a reader copies out of the documentation is run, with the small model's sizes and the test's servers."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_replay import stats
from vllm_ascend_replay.config import read_settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("README.md")])
SHELL = ("sh", "bash", "shell", "console")
BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
# The tests' servers hold a small model: window 8, 97 token ids, 4096 positions.
SMALLER = {"8192,65536": "129,257", "--tokens 65536": "--tokens 257"}
SMALL = {
    "verify": "--window 8 --vocab-size 97 --lengths 9,129 --tokens 4 --needle-tokens 0",
    "bench": "--vocab-size 97 --waves 1 --concurrency 1",
}
ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")


def commands():
    for page in PAGES:
        for _, language, block in BLOCK.findall(page.read_text()):
            if language in SHELL:
                for line in block.replace("\\\n", " ").splitlines():
                    if line.strip() and not line.lstrip().startswith("#"):
                        yield page.name, line.strip().removeprefix("$ ")


COMMANDS = sorted(set(commands()))


def split(line):
    """Variables that are set for the command, and the command's words."""
    words = shlex.split(line.replace("$(mktemp -d)", "new-directory"), comments=True)
    variables = {}
    while words and (ASSIGNMENT.match(words[0]) or words[0] == "export"):
        word = words.pop(0)
        if word != "export":
            name, value = word.split("=", 1)
            variables[name] = value
    return variables, words


@pytest.fixture(scope="session")
def flash_plan(tmp_path_factory):
    from vllm_ascend_replay.reference.config import write_model

    return write_model(tmp_path_factory.mktemp("models") / "flash", "v41-flash-plan")


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_command(page, line, request, command, tmp_path, monkeypatch):
    variables, words = split(line)
    read_settings({name: value for name, value in variables.items() if name.startswith("ASCEND_REPLAY")})
    match words:
        case []:
            assert variables, "an empty command"
        case ["make", *targets]:
            goals = [target for target in targets if "=" not in target]
            listed = subprocess.run(["make", "-C", ROOT, "help"], capture_output=True, text=True, check=True).stdout
            assert set(goals) <= {line.split()[0] for line in listed.splitlines() if line.strip()}
        case ["pip", "install", *requirements]:
            metadata = (ROOT / "pyproject.toml").read_text()
            for requirement in requirements:
                if requirement == ".":  # the checkout itself; `make package` installs what it builds
                    continue
                name, _, extra = requirement.rstrip("]").partition("[")
                assert f'name = "{name}"' in metadata
                assert not extra or f"\n{extra} = [" in metadata
        case ["vllm", "serve", model, *arguments]:
            from vllm_ascend_replay.cli.doctor import parse_arguments

            assert parse_arguments([model, *arguments]).model == model
        case ["vllm-ascend-replay", name, *arguments]:
            _run(name, arguments, variables, request, command, tmp_path, monkeypatch)
        case ["curl", *_]:
            servers = request.getfixturevalue("servers")
            script = line.replace("http://localhost:8000", servers["on"].url)
            done = subprocess.run(["bash", "-c", f"{script} --fail -sS"], capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            assert '"rows_kept"' in done.stdout
        case _:
            pytest.fail(f"{page} has a command that no test runs: {line}")


def _run(name, arguments, variables, request, command, tmp_path, monkeypatch):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"name": "mine", "prompt": [5, 9, 14, 3, 7, 7, 20, 31, 6, 80]}\n')
    text = shlex.join(arguments)
    if "localhost" in text:
        servers = request.getfixturevalue("servers")
        for port, server in (("8000", "on"), ("8001", "off")):
            text = text.replace(f"http://localhost:{port}", servers[server].url)
        for written, smaller in SMALLER.items():
            text = text.replace(written, smaller)
        text += f" {SMALL[name]}"
    if "/models/" in text:
        text = re.sub(r"/models/[\w.-]+", str(request.getfixturevalue("flash_plan")), text)
    if name == "doctor":
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    if name == "demo":
        pytest.skip("tests/test_demo.py runs it")
    outcome = command(name, *shlex.split(text))
    assert outcome.status == 0, outcome.text


def test_the_log_line_on_the_page_is_one():
    counted = {
        "rows_in": 20000,
        "rows_kept": 5280,
        "steps": 31,
        "replay_steps": 11,
        "graph_steps": 0,
        "skipped_steps": 9,
        "full_steps_by_reason": {"no prompt of the step is bounded": 2},
    }
    assert stats.log_line(counted, 10.2) in (ROOT / "docs/counters.md").read_text()


def test_the_saving_on_the_page_is_what_doctor_says(flash_plan):
    import json

    from vllm_ascend_replay.cli.doctor import expected_saving
    from vllm_ascend_replay.config import ReplaySettings
    from vllm_ascend_replay.layer_plan import read_layer_plan
    from vllm_ascend_replay.reference.config import ReferenceConfig

    plan = read_layer_plan(ReferenceConfig(**json.loads((flash_plan / "config.json").read_text())))
    page = (ROOT / "docs/benchmarks.md").read_text()
    for keep in ("window", "exact"):
        for tokens in (1024, 8192, 65536, 131072):
            saving = expected_saving(plan, ReplaySettings(keep=keep), tokens, chunk=8192)
            rows = f"{saving.kept_rows:,} | {saving.skipped_steps} of {saving.steps}"
            assert f"| {keep} | {tokens:,} | {rows} | {1 - saving.layer_rows / saving.layer_rows_full:.1%} |" in page


def test_every_counter_is_on_the_page():
    page = (ROOT / "docs/counters.md").read_text()
    for metric, _ in stats._METRICS.values():
        assert f"`vllm_ascend_replay_{metric}_total`" in page


def test_every_test_that_a_page_names_exists():
    written = "\n".join(file.read_text() for file in ROOT.glob("tests/**/*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in written, f"{page.name}: {name}"
        for path in re.findall(r"`(tests/[\w/]+\.py)`", page.read_text()):
            assert (ROOT / path).is_file(), f"{page.name}: {path}"


def test_every_setting_is_on_the_page():
    from vllm_ascend_replay import config

    page = (ROOT / "docs/settings.md").read_text()
    assert [name for name in config._PARSERS if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_python_blocks_run(page):
    for _, language, block in BLOCK.findall(page.read_text()):
        if language == "python":
            done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, env=os.environ)
            assert done.returncode == 0, done.stderr
