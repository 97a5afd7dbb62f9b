"""vLLM's OpenAI-compatible API server on a model directory, for as long as a ``with`` block lasts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

HOST = "127.0.0.1"
REFERENCE_ARGUMENTS = (
    "--load-format=dummy",
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--dtype=float32",
    "--seed=0",
    "--max-logprobs=-1",
    f"--kv-cache-memory-bytes={1 << 26}",
)
"""What the reference model needs, beside ``--model``: it has no weights and no tokenizer. Small enough for any
machine."""


class ServerFailed(RuntimeError):
    """The server ended, or was not ready in time; the message ends with its log."""


@contextmanager
def serve(
    model: str | Path,
    log: Path,
    *,
    arguments: Sequence[str] = REFERENCE_ARGUMENTS,
    environ: Mapping[str, str] | None = None,
    patience: float = 900,
) -> Iterator[str]:
    """Start a server on a free loopback port; end it, with all its processes, when the block ends.

    Args:
        model: directory of the model.
        log: file that takes what the server prints.
        arguments: of the server, beside the model and the address.
        environ: its environment; default this process's.
        patience: seconds until it must be ready.

    Yields:
        The server's URL.

    Raises:
        ServerFailed: the server did not come up.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    url = f"http://{HOST}:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--host", HOST, "--port", str(port), *arguments]
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if environ is None else dict(environ),
            start_new_session=True,  # a group of its own, so that its workers can be ended with it
        )
        try:
            _wait(server, url, log, patience)
            yield url
        finally:
            _end(server)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path, patience: float) -> None:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if server.poll() is not None:
            raise ServerFailed(f"the server ended with status {server.returncode}:\n{_tail(log)}")
        # Also a refused connection and an HTTP error are OSErrors: not ready yet.
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.3)
    raise ServerFailed(f"the server was not ready after {patience:.0f} s:\n{_tail(log)}")


def _end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=30)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # what the server left behind, if anything
    server.wait()


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
