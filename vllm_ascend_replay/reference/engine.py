"""Runs requests through vLLM's real engine, in this process, and reports what the engine did with them.

Nothing of the engine is replaced. What it did is read off its scheduler's decisions and off the rows that enter the
model's last layer, so that a report does not rest on the counters it is compared with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_replay import stats

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "vllm_ascend_replay",
    "HF_HUB_OFFLINE": "1",
}
"""What the engine's process needs, before vLLM is imported. Multiprocessing off: the engine runs in the process
itself, where its counters can be read."""


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it, greedily."""

    name: str
    prompt: list[int]
    max_tokens: int
    prompt_logprobs: bool = False
    """Ask for the log-probabilities of the prompt's own tokens: every row is read."""
    at_step: int = 0
    """The request arrives before this step of the engine."""


@dataclass
class Prefill:
    """One prefill of a request: its first, or the one after a preemption."""

    length: int
    """Tokens to prefill; after a preemption the generated ones are among them."""
    replay_start: int
    """First position that encoder-side replay recomputes after a prefix hit; 0: none."""
    computed: int
    """Tokens that were not run: a prefix hit, less the replayed ones."""
    steps: list[int] = field(default_factory=list)
    """Tokens of the request in each step that it took part in, decodes included."""

    @property
    def chunks(self) -> int:
        """Steps that the prefill took."""
        done, count = self.computed, 0
        for tokens in self.steps:
            if done >= self.length:
                break
            done, count = done + tokens, count + 1
        return count


@dataclass
class RequestRun:
    """What came of a request."""

    tokens: list[int]
    logprobs: list[list[float]]
    """Log-probability of every token of the vocabulary, for each generated token."""
    prompt_logprobs: list[list[float]] | None
    """The same for the prompt's tokens from the second on, if they were asked for."""
    prefills: list[Prefill]


@dataclass
class Run:
    """What came of a set of requests."""

    requests: dict[str, RequestRun]
    layer_rows: int
    """Rows that entered the model's last layer."""
    stats: dict[str, Any]
    """`vllm_ascend_replay.stats.snapshot` of these requests; all zero where replay is off."""
    preemptions: int
    """vLLM's counter."""
    seconds: float

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Run:
        """The inverse of `dataclasses.asdict`."""
        requests = {
            name: RequestRun(**{**run, "prefills": [Prefill(**prefill) for prefill in run["prefills"]]})
            for name, run in values["requests"].items()
        }
        return cls(**{**values, "requests": requests})


class Engine:
    """vLLM's engine on a directory of `reference.config.write_model`."""

    def __init__(self, model: str, **engine_args: Any) -> None:
        """
        Args:
            model: the model directory.
            engine_args: fields of vLLM's ``EngineArgs``.
        """
        from vllm import EngineArgs, LLMEngine

        args: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "seed": 0,
            "max_logprobs": -1,
            "disable_log_stats": False,
            # One step at a time, so that a token can be told apart from the step it was sampled in.
            "async_scheduling": False,
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **{**args, **engine_args}))
        self.vocabulary = range(self.engine.model_config.get_vocab_size())
        self._scheduler = self.engine.engine_core.engine_core.scheduler
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._recorded_schedule
        self._prefills: dict[str, list[Prefill]] = {}
        self._layer_rows = 0
        self._model = self.engine.model_executor.driver_worker.worker.model_runner.model
        self._model.layers[-1].register_forward_pre_hook(self._count_rows)

    def run(self, requests: Sequence[Request]) -> Run:
        """Run the requests to their end.

        Counters start at zero. The prefix cache is left as earlier runs left it.
        """
        from vllm import SamplingParams

        began = time.perf_counter()
        preempted = self._preemptions()
        self._prefills.clear()
        self._layer_rows = 0
        stats.reset()
        ids: dict[str, str] = {}
        outputs: dict[str, Any] = {}
        waiting = sorted(requests, key=lambda request: request.at_step)
        step = 0
        while waiting or self.engine.has_unfinished_requests():
            while waiting and (waiting[0].at_step <= step or not self.engine.has_unfinished_requests()):
                request = waiting.pop(0)
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=request.max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=-1,
                    prompt_logprobs=-1 if request.prompt_logprobs else None,
                )
                ids[request.name] = self.engine.add_request(request.name, {"prompt_token_ids": request.prompt}, params)
            for output in self.engine.step():
                outputs[output.request_id] = output
            step += 1
        return Run(
            requests={r.name: self._request_run(outputs[r.name], self._prefills[ids[r.name]]) for r in requests},
            layer_rows=self._layer_rows,
            stats=stats.snapshot(),
            preemptions=self._preemptions() - preempted,
            seconds=time.perf_counter() - began,
        )

    def weights(self) -> dict[str, Any]:
        """The model's weights, by dotted name."""
        return self._model.weights()

    def shutdown(self) -> None:
        """End the engine."""
        self.engine.engine_core.shutdown()

    def _request_run(self, output: Any, prefills: list[Prefill]) -> RequestRun:
        completion = output.outputs[0]
        prompt = output.prompt_logprobs
        return RequestRun(
            tokens=list(completion.token_ids),
            logprobs=[self._row(entry) for entry in completion.logprobs],
            prompt_logprobs=None if prompt is None else [self._row(entry) for entry in prompt[1:]],
            prefills=prefills,
        )

    def _row(self, entry: Mapping[int, Any]) -> list[float]:
        return [entry[token].logprob for token in self.vocabulary]

    def _recorded_schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:  # a resumed request too
            prefill = Prefill(len(new.prefill_token_ids), new.replay_start, new.num_computed_tokens)
            self._prefills.setdefault(new.req_id, []).append(prefill)
        for name, tokens in output.num_scheduled_tokens.items():
            if name in self._prefills:
                self._prefills[name][-1].steps.append(tokens)
        return output

    def _count_rows(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        self._layer_rows += inputs[0].shape[0]

    def _preemptions(self) -> int:
        return sum(int(m.value) for m in self.engine.get_metrics() if m.name == "vllm:num_preemptions")


def prepare_environment(settings: Mapping[str, str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an engine's process.

    Args:
        settings: the only ``ASCEND_REPLAY...`` variables that the process sees.
        environ: what to start from; default this process's.
    """
    environ = os.environ if environ is None else environ
    kept = {name: value for name, value in environ.items() if not name.startswith("ASCEND_REPLAY")}
    return {"OMP_NUM_THREADS": "1", **kept, **ENVIRONMENT, **settings}
