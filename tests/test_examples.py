"""The examples run as they stand: what a reader would copy is taken out of the files and executed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[1] / "examples"
# The commands of this environment come first, as after `. .venv/cpu/bin/activate`.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("ASCEND_REPLAY", "VLLM_"))},
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def run(command, cwd, **kwargs):
    """Run to the end; the output of a failure is shown."""
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=540, **kwargs)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def shell(script, cwd):
    return run(["bash", "-euo", "pipefail", "-c", script], cwd)


def test_offline_inference(tmp_path):
    output = run([sys.executable, str(EXAMPLES / "offline_inference.py")], tmp_path)
    tokens = re.findall(r"^(\d+) prompt tokens -> \[(.+)\]$", output, re.MULTILINE)
    assert [int(length) for length, _ in tokens] == [61, 301, 577]
    assert all(len(ids.split(",")) == 8 for _, ids in tokens)
    (kept, rows), *others = re.findall(r"the replay layers ran (\d+) of (\d+) rows", output)
    assert not others
    assert int(rows) == 61 + 301 + 577 + 3 * 7
    # The last window of each prompt, and the decodes.
    assert int(kept) == 3 * 8 + 3 * 7


@pytest.fixture(scope="module")
def page():
    """Blocks of the server example by language, on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = (EXAMPLES / "openai_server.md").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    text = text.replace("--port 8000", f"--port {port}")
    assert "8000" not in text
    blocks = {"port": port}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        blocks.setdefault(language, []).append(block)
    return blocks


@pytest.fixture(scope="module")
def server(page, tmp_path_factory):
    """The page's server, and the directory and log that it runs with."""
    directory = tmp_path_factory.mktemp("server")
    write_model, serve, *_ = page["bash"]
    shell(write_model, directory)
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", serve],
            cwd=directory,
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 540
        while not _healthy(page["port"]):
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < until, log.read_text()[-6000:]
            time.sleep(0.5)
        yield directory, log
    finally:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        with suppress(ProcessLookupError):  # nothing was left
            os.killpg(process.pid, signal.SIGKILL)


def _healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_server_answers_and_replays(page, server):
    directory, log = server
    _, _, curl, _ = page["bash"]
    answer = shell(curl, directory)
    assert re.search(r'"token_ids":\[(\d+,){7}\d+\]', answer), answer
    (python,) = page["python"]
    tokens = run([sys.executable, "-c", python], directory)
    assert re.fullmatch(r"\[(\d+, ){7}\d+\]\n", tokens)
    # The line that the page promises, word for word.
    promised = page["text"][1].strip()
    assert promised in log.read_text()


def test_the_setting_on_the_page_is_one(page, tmp_path):
    setting = page["bash"][3]
    check = "from vllm_ascend_replay.config import read_settings; print(read_settings().keep)"
    assert shell(f'{setting}\npython -c "{check}"', tmp_path).strip() == "exact"
