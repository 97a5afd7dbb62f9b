"""Token-id prompts for an OpenAI-compatible server, and faults that name the request and what came back."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

SHOWN = 400
"""Characters of an answer that a fault shows."""
FIRST_TOKEN_ID = 3
"""Random prompts leave the lowest ids out: they tend to be special tokens."""


class ServerFault(RuntimeError):
    """A server did not answer as it should; the message names the request and the answer."""


@dataclass(frozen=True)
class Timing:
    """A streamed answer."""

    first_token: float
    """Seconds from sending the request to the first token."""
    seconds: float
    """Seconds to the end of the answer."""
    prompt_tokens: int
    cached_tokens: int | None
    """Of the prompt, served from the prefix cache; ``None`` where the server does not tell."""


def random_prompt(rng: np.random.Generator, tokens: int, vocab_size: int) -> list[int]:
    """``tokens`` ids, uniform over the vocabulary without its lowest ids."""
    return rng.integers(min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size, tokens).tolist()


def base_url(url: str) -> str:
    """``url`` without a trailing ``/`` or ``/v1``."""
    return url.rstrip("/").removesuffix("/v1")


def headers(api_key: str | None) -> dict[str, str]:
    """HTTP headers of every request."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."


def _describe(url: str, name: str, body: dict[str, Any]) -> str:
    prompt = body["prompt"]
    size = f"{len(prompt)} tokens" if isinstance(prompt, list) else f"{len(prompt)} characters"
    asked = ", ".join(
        f"{k} {body[k]}" for k in ("max_tokens", "logprobs", "prompt_logprobs") if body.get(k) is not None
    )
    return f"request {name!r} to {url}/v1/completions ({size}; {asked})"


def _went_wrong(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _hint(status: int, answer: str) -> str:
    if status == 400 and "vocab" in answer.lower():
        return " (give the model's size with --vocab-size)"
    return ""


class Completions:
    """Requests to one server, one after the other."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = 600) -> None:
        """
        Args:
            url: the server, with or without ``/v1``.
            model: its name there; ``None``: the first one that the server lists.
            api_key: sent as a bearer token.
            timeout: seconds that a read may take.

        Raises:
            ServerFault: the server cannot be asked for its models.
        """
        self.url = base_url(url)
        self.http = httpx.Client(headers=headers(api_key), timeout=httpx.Timeout(timeout, connect=10))
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        where = f"GET {self.url}/v1/models"
        try:
            response = self.http.get(f"{self.url}/v1/models")
        except httpx.HTTPError as error:
            raise ServerFault(f"{where}: {_went_wrong(error)}") from error
        if response.status_code != 200:
            raise ServerFault(f"{where}: HTTP {response.status_code}: {_shown(response.text)}")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ServerFault(f"{where}: the answer names no model: {_shown(response.text)}") from error

    def complete(self, name: str, prompt: Sequence[int] | str, **fields: Any) -> dict[str, Any]:
        """The first choice of a completion.

        Args:
            name: of the request, for faults.
            prompt: token ids or a text.
            fields: of the request's body.

        Raises:
            ServerFault: no answer, an error, or an answer without a choice.
        """
        body = {"model": self.model, "prompt": prompt, **fields}
        where = _describe(self.url, name, body)
        try:
            response = self.http.post(f"{self.url}/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise ServerFault(f"{where}: {_went_wrong(error)}") from error
        if response.status_code != 200:
            hint = _hint(response.status_code, response.text)
            raise ServerFault(f"{where}: HTTP {response.status_code}: {_shown(response.text)}{hint}")
        try:
            choice = response.json()["choices"][0]
        except (ValueError, LookupError, TypeError) as error:
            raise ServerFault(f"{where}: the answer has no choice: {_shown(response.text)}") from error
        if not isinstance(choice, dict):
            raise ServerFault(f"{where}: the answer's choice is no object: {_shown(response.text)}")
        return choice

    def fault(self, name: str, prompt: Sequence[int] | str, what: str, **fields: Any) -> ServerFault:
        """A fault of an answer that `complete` accepted."""
        return ServerFault(f"{_describe(self.url, name, {'prompt': prompt, **fields})}: {what}")

    def metrics(self) -> str:
        """The text of ``/metrics``; empty where there is none."""
        try:
            response = self.http.get(f"{self.url}/metrics")
        except httpx.HTTPError:
            return ""
        return response.text if response.status_code == 200 else ""

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


async def stream(
    http: httpx.AsyncClient, url: str, name: str, body: dict[str, Any], expected_tokens: int | None = None
) -> Timing:
    """Send a streaming completion and time it.

    Args:
        http: the client.
        url: `base_url` of the server.
        name: of the request, for faults.
        body: without the streaming fields.
        expected_tokens: length of the prompt, should the server not count it.

    Raises:
        ServerFault: no answer, an error (also inside the stream), or a stream that ends before its end.
    """
    where = _describe(url, name, body)
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    began, first, finished = time.perf_counter(), None, False
    usage: dict[str, Any] = {}
    chunks = 0
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=asked) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                hint = _hint(response.status_code, text)
                raise ServerFault(f"{where}: HTTP {response.status_code}: {_shown(text)}{hint}")
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    finished = True
                    break
                try:
                    chunk = json.loads(data)
                except ValueError as error:
                    raise ServerFault(f"{where}: a chunk of the stream is no JSON: {_shown(data)}") from error
                if not isinstance(chunk, dict) or chunk.get("error"):
                    raise ServerFault(f"{where}: an error in the stream: {_shown(data)}")
                chunks += 1
                if chunk.get("choices") and first is None:
                    first = time.perf_counter() - began
                usage = chunk.get("usage") or usage
    except httpx.HTTPError as error:
        raise ServerFault(f"{where}: after {chunks} chunks: {_went_wrong(error)}") from error
    if not finished:
        raise ServerFault(f"{where}: the stream ended after {chunks} chunks without its end ([DONE])")
    if first is None:
        raise ServerFault(f"{where}: the stream ended without a token")
    details = usage.get("prompt_tokens_details") or {}
    return Timing(
        first_token=first,
        seconds=time.perf_counter() - began,
        prompt_tokens=int(usage.get("prompt_tokens") or expected_tokens or 0),
        cached_tokens=details.get("cached_tokens"),
    )
