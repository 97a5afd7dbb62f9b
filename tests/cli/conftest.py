"""Real API servers with replay on and off, and servers that misbehave; all on loopback, started once for a session."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_ascend_replay.cli import app


@dataclass(frozen=True)
class Server:
    url: str
    log: Path


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    status: int
    text: str
    report: dict


@pytest.fixture
def command(tmp_path):
    """Runs the command with ``--json``; a traceback fails the test."""

    def run(*arguments: str) -> Outcome:
        file = tmp_path / "report.json"
        file.unlink(missing_ok=True)
        result = CliRunner().invoke(app, [*arguments, "--json", str(file)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert "Traceback" not in result.output
        return Outcome(result.exit_code, result.output, json.loads(file.read_text()) if file.exists() else {})

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    from vllm_ascend_replay.reference.config import write_model

    return write_model(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(scope="session")
def servers(tiny_model, tmp_path_factory) -> Iterator[dict[str, Server]]:
    """``on`` and ``off``: the same model with and without replay, started side by side."""
    from vllm_ascend_replay.reference.engine import prepare_environment
    from vllm_ascend_replay.reference.server import serve

    scratch = tmp_path_factory.mktemp("servers")
    settings = {"on": {"ASCEND_REPLAY_LOG_EVERY": "1"}, "off": {"ASCEND_REPLAY": "0"}}

    def start(name: str) -> Server:
        metrics = scratch / f"{name}-metrics"
        metrics.mkdir()
        environ = {
            **prepare_environment(settings[name]),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
            "PROMETHEUS_MULTIPROC_DIR": str(metrics),
        }
        log = scratch / f"{name}.log"
        return Server(stack.enter_context(serve(tiny_model, log, environ=environ)), log)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield dict(zip(settings, pool.map(start, settings)))


class Fault:
    """How the misbehaving server answers; a test sets `how`."""

    def __init__(self) -> None:
        self.how = ""
        self.answered = 0

    async def app(self, scope, receive, send):
        from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/v1/models":
            answer = JSONResponse({"oops": 1}) if self.how == "no model" else JSONResponse({"data": [{"id": "faulty"}]})
            return await answer(scope, receive, send)
        if scope["path"] != "/v1/completions":
            return await PlainTextResponse("", 404)(scope, receive, send)
        request = json.loads(body)
        self.answered += 1
        fails = self.how == "error" or (self.how == "error later" and self.answered > 3)
        if fails or (self.how == "error above 9" and len(request["prompt"]) > 9):
            answer = JSONResponse({"error": {"message": "the engine is on fire"}}, 500)
        elif self.how == "not json":
            answer = PlainTextResponse("<html>proxy</html>")
        elif self.how == "no choice":
            answer = JSONResponse({"choices": []})
        elif self.how == "closes":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
            await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
            return None  # the connection is closed with most of the answer missing
        elif request.get("stream"):
            answer = StreamingResponse(self.stream(), media_type="text/event-stream")
        else:
            answer = JSONResponse({"choices": [self.choice(request)]})
        return await answer(scope, receive, send)

    async def stream(self):
        def event(value):
            return f"data: {json.dumps(value)}\n\n"

        if self.how == "error in stream":
            yield event({"error": {"message": "cancelled by the engine"}})
        elif self.how == "bad chunk":
            yield "data: {oops\n\n"
        elif self.how != "no token":
            yield event({"choices": [{"text": ""}]})
        if self.how != "no end":
            yield event({"choices": [], "usage": {"prompt_tokens": 7}})
            yield "data: [DONE]\n\n"

    def choice(self, request):
        n, k = request["max_tokens"], len(request["prompt"])
        choice = {"token_ids": [5] * n, "logprobs": {"top_logprobs": [{"token_id:5": -0.5}] * n}}
        choice["prompt_logprobs"] = [None, *([{"5": {"logprob": -0.5}}] * (k - 1))]
        if isinstance(request["prompt"], str):
            choice["prompt_token_ids"] = [5] * 20
        if self.how == "no logprobs":
            choice["logprobs"] = None
        elif self.how == "no prompt logprobs":
            del choice["prompt_logprobs"]
        elif self.how == "bad prompt logprobs":
            choice["prompt_logprobs"] = [None, *([{"5": {}}] * (k - 1))]
        elif self.how == "no token ids":
            del choice["token_ids"]
        elif self.how == "words":
            choice["logprobs"] = {"top_logprobs": [{" the": -0.5}] * n}
        elif self.how == "too few":
            choice["token_ids"] = [5]
        return choice


@pytest.fixture(scope="session")
def _faulty() -> Iterator[tuple[str, Fault]]:
    import uvicorn

    fault = Fault()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(fault.app, interface="asgi3", log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", fault
        server.should_exit = True
        thread.join()


@pytest.fixture
def faulty(_faulty):
    """The misbehaving server's URL and its `Fault`."""
    url, fault = _faulty
    fault.how, fault.answered = "", 0
    return url, fault
