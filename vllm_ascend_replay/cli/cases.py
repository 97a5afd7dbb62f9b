"""The demo's cases: what each one runs, and what must be true of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_replay.reference.engine import Prefill, Request, RequestRun, Run

if TYPE_CHECKING:
    from vllm_ascend_replay.reference.oracle import Oracle, OracleRun, SourceKV

MODEL = "tiny"
"""Preset of the reference model: nine layers, four of them replay layers, window 8."""
VOCABULARY = 97
ENGINE = {
    "block_size": 16,
    "max_model_len": 320,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    # Few enough that six small requests do not fit together, so that vLLM preempts.
    "num_gpu_blocks_override": 52,
    "kv_cache_memory_bytes": 64 << 20,
}
"""vLLM's engine arguments. At most 48 tokens run in a step: longer prompts are cut into chunks."""

TOLERANCE = 1e-5
"""Largest allowed difference of a log-probability (the engine computes in float32, the oracle in float64)."""


@dataclass(frozen=True)
class Case:
    """Requests that run together, and what the demo expects of them."""

    name: str
    requests: list[Request]
    before: tuple[Request, ...] = ()
    """Run first, and not counted."""
    keep: str = "window"
    """``ASCEND_REPLAY_KEEP``."""
    saves: bool = True
    """The replay layers must run fewer rows than without replay."""
    off: str = ""
    """Name of the case whose run without replay this one must equal; by default its own, which it need not."""
    happened: Callable[[Run], str | None] = lambda run: None
    """Why the case did not exercise what it is named for; ``None``: it did."""

    @property
    def compared_with(self) -> str:
        """Name of the case that ran without replay."""
        return self.off or self.name


def _prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


def _chunks(run: Run, name: str) -> int:
    return run.requests[name].prefills[0].chunks


def _need(condition: bool, otherwise: str) -> str | None:
    return None if condition else otherwise


def all_cases() -> list[Case]:
    """The cases in the order they run. No prompt begins like another's, except where a prefix is shared on purpose."""
    long_prompt = Request("long", _prompt(2, 301), 6)
    shared = _prompt(4, 77)
    several_chunks = lambda run: _need(_chunks(run, "long") > 1, "the long prompt ran in one chunk")  # noqa: E731
    return [
        Case(
            "cold prompt in one chunk",
            [Request("cold", _prompt(1, 45), 6)],
            happened=lambda run: _need(_chunks(run, "cold") == 1, "the prompt was cut into chunks"),
        ),
        Case("long prompt in chunks", [long_prompt], happened=several_chunks),
        Case(
            "mixed with decodes",
            [
                Request("first", _prompt(3, 13), 14),
                Request("second", _prompt(31, 29), 12),
                Request("long", _prompt(32, 151), 5, at_step=3),
                Request("last", _prompt(33, 41), 3, at_step=5),
            ],
            happened=several_chunks,
        ),
        Case(
            "prefix hit",
            [Request("hit", shared + _prompt(41, 46), 6)],
            before=(Request("donor", shared + _prompt(42, 23), 1),),
            happened=lambda run: _need(run.requests["hit"].prefills[0].replay_start > 0, "nothing was found cached"),
        ),
        Case(
            "prompt log-probabilities",
            [
                Request("every row", _prompt(5, 37), 4, prompt_logprobs=True),
                Request("beside", _prompt(51, 55), 4),
                Request("after", _prompt(52, 27), 4),
            ],
        ),
        Case("shorter than the window", [Request("short", _prompt(6, 5), 12)], saves=False),
        Case(
            "preempted and resumed",
            [Request(str(i), _prompt(70 + i, 21 + 2 * i), 33) for i in range(6)],
            happened=lambda run: _need(run.preemptions > 0, "nothing was preempted"),
        ),
        Case(
            "long prompt, exact",
            [long_prompt],
            keep="exact",
            off="long prompt in chunks",
            happened=several_chunks,
        ),
    ]


def kept_rows(request: Request, prefill: Prefill, keep_last: int | None) -> int:
    """Rows of the replay layers in one prefill of a request and the decodes after it; ``keep_last`` None: replay off.

    Written from the rule, not from the plan that it checks: under ``final`` a prompt that can save a row runs only
    the rows at its last ``keep_last`` positions.
    """
    position, rows = prefill.computed, 0
    floor = late_floor(request, prefill, keep_last)
    for tokens in prefill.steps:
        rows += sum(p >= floor for p in range(position, position + tokens))
        position += tokens
    return rows


def late_floor(request: Request, prefill: Prefill, keep_last: int | None) -> int:
    """First position of which the late layers hold window KV."""
    if keep_last is None or request.prompt_logprobs:
        return prefill.replay_start
    return max(prefill.length - keep_last, prefill.replay_start)


def oracle_logprobs(
    oracle: Oracle, request: Request, run: RequestRun, keep_last: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """What the request's log-probabilities must be: ``[tokens, vocabulary]``, and ``[prompt - 1, vocabulary]``.

    The oracle continues with the tokens that the engine sampled. After a preemption the generated tokens belong to
    what is prefilled, so each prefill has a floor of its own; what it finds cached is what the one before wrote.
    """
    window = oracle.config.sliding_window
    tokens = request.prompt + run.tokens
    rows: list[np.ndarray] = []
    prompt_rows = np.empty((0, oracle.config.vocab_size))
    cached: Mapping[int, SourceKV] | None = None
    for prefill, following in zip(run.prefills, [*run.prefills[1:], None]):
        end = len(tokens) - 1 if following is None else following.length - 1
        start, hit = prefill.replay_start, 0
        if start:
            hit = start + window
            cached = cached or oracle.run(tokens[:hit]).sources
        floors = oracle.late_floor(late_floor(request, prefill, keep_last), end, start)
        result: OracleRun = oracle.run(
            tokens[:end], floors=floors, start=start, hit=hit, donor=cached if start else None
        )
        cached = result.sources
        logprobs = result.logprobs()
        rows.extend(logprobs[prefill.length - 1 - start :])
        if request.prompt_logprobs:
            prompt_rows = logprobs[: len(request.prompt) - 1]
    return np.array(rows), prompt_rows
