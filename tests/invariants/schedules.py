"""Random schedules of steps against the oracle: a small scheduler that draws every decision.

It decides what vLLM's scheduler could decide: chunks of any size, decodes with accepted and rejected drafts, drafts
behind a prompt's last chunk, prefix hits with encoder-side replay, requests that keep every row, padding, lengths that
only the device knows, preemption and resumption. What each request must come to is worked out here anew, position by
position, from the words of the policies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from tests.invariants.support import check_replay, late_layers
from tests.reference.test_model_vs_oracle import cacheable_pages
from tests.support.oracle import Oracle, OracleRun, SourceKV
from tests.support.stepper import Stepper, StepperRequest

VOCABULARY = 97
LONGEST_PROMPT = 48
MOST_DECODES = 6
MOST_REQUESTS = 3

FEATURES = (
    "a prefix hit",
    "every row kept",
    "a preemption",
    "a prefix hit after a preemption",
    "a trimmed step",
    "a step without kept rows",
    "a rejected draft",
    "a rejected draft behind a prompt",
    "lengths that only the device knows",
    "padding",
)
"""What a set of schedules should have seen."""


@dataclass(eq=False)
class Life:
    """A request from its start, or its resumption, to its end or preemption."""

    request: StepperRequest
    ids: list[int]
    """What its tokens really are; drafts are written over them for a step."""
    oracle: Oracle
    donor: Life | None
    pages: list[torch.Tensor]
    """The cached pages of a hit, as the request found them."""
    floor: np.ndarray
    """int ``[L]``: lowest window position that each row may read in the late layers."""
    kept: np.ndarray
    """bool ``[L]``."""
    start: int = field(init=False)
    hit: int = field(init=False)

    def __post_init__(self) -> None:
        self.start, self.hit = self.request.replay_start, self.request.hit

    def run(self, floors: dict[int, np.ndarray] | None = None) -> OracleRun:
        donor = None if self.donor is None else self.donor.sources
        return self.oracle.run(self.ids, start=self.start, hit=self.hit, donor=donor, floors=floors)

    @cached_property
    def sources(self) -> dict[int, SourceKV]:
        """Compressed entries, as a later hit finds them."""
        return self.run().sources


class Schedule:
    """Draws and runs one schedule."""

    def __init__(self, stepper: Stepper, oracle: Oracle, seed: int) -> None:
        self.stepper, self.oracle, self.rng = stepper, oracle, np.random.default_rng(seed)
        self.seen: Counter[str] = Counter()
        """How often each of `FEATURES` happened."""
        self.lives: list[Life] = []
        self.paused: list[Life] = []
        stepper.reset()

    def choose(self, low: int, high: int) -> int:
        """An integer within both bounds."""
        return int(self.rng.integers(low, high + 1))

    def sometimes(self, one_in: int) -> bool:
        return self.choose(0, one_in - 1) == one_in - 1

    def run(self) -> None:
        """Run to the end and compare every request with the oracle."""
        self._add()
        for _ in range(self.choose(1, 7)):
            if len(self.lives) + len(self.paused) < MOST_REQUESTS and self.sometimes(2):
                self._add()
            if self.sometimes(4):
                self._preempt()
            if self.paused and self.sometimes(2):
                self._resume()
            self._step()
        while self.paused:
            self._resume()
        while any(life.request.left for life in self.lives):
            self._step(everything=True)
        for life in self.lives:
            self._check(life)
        assert self.stepper.null_block_untouched()

    # -- requests -----------------------------------------------------------------------------------------------

    def _add(self) -> None:
        donor, hit = self._find_hit()
        ids = [] if donor is None else donor.ids[:hit]
        prompt_len = hit + self.choose(1, LONGEST_PROMPT - hit)
        length = prompt_len + self.choose(0, MOST_DECODES)
        ids = ids + self.rng.integers(0, VOCABULARY, length - len(ids)).tolist()
        request = self.stepper.add(
            ids,
            prompt_len=prompt_len,
            donor=None if donor is None else donor.request,
            hit=hit,
            # vLLM serves a request that reads its prompt's log-probabilities no cached prefix.
            prompt_logprobs=donor is None and self.sometimes(5),
        )
        self._begin(request, ids, donor)

    def _begin(self, request: StepperRequest, ids: list[int], donor: Life | None) -> None:
        request.ran[:] = request.kept[:] = False
        self.seen["a prefix hit"] += donor is not None
        self.seen["every row kept"] += request.prompt_logprobs
        pages = cacheable_pages(self.stepper, request, request.hit)
        floor, kept = np.zeros(len(ids), dtype=int), np.zeros(len(ids), dtype=bool)
        self.lives.append(Life(request, ids, self.oracle, donor, pages, floor, kept))

    def _find_hit(self) -> tuple[Life | None, int]:
        """A running request whose first ``hit`` tokens are in the prefix cache."""
        size, window = self.stepper.block_sizes[self.stepper.is_cacheable.index(True)], self._window
        least = -(-(window + 1) // size)
        donors = [life for life in self.lives if min(life.request.computed, LONGEST_PROMPT - 1) // size >= least]
        if not donors or self.sometimes(4):
            return None, 0
        donor = donors[self.choose(0, len(donors) - 1)]
        return donor, size * self.choose(least, min(donor.request.computed, LONGEST_PROMPT - 1) // size)

    def _preempt(self) -> None:
        running = [life for life in self.lives if life.request.computed > life.start and life.request.left]
        # More often one that had a hit: there are few.
        with_hit = [life for life in running if life.donor is not None]
        running = running if self.sometimes(3) or not with_hit else with_hit
        if running:
            life = running[self.choose(0, len(running) - 1)]
            self.lives.remove(life)
            self.paused.append(life)
            self.seen["a preemption"] += 1
            self.stepper.preempt(life.request)

    def _resume(self) -> None:
        life = self.paused.pop(0)
        donor, hit = None, 0
        # What gave it the hit may still be in the cache.
        if life.donor in self.lives and life.donor.request.computed >= life.hit:
            donor, hit = life.donor, life.hit
            self.seen["a prefix hit after a preemption"] += 1
        self.stepper.resume(life.request, donor=None if donor is None else donor.request, hit=hit)
        self._begin(life.request, life.ids, donor)

    # -- a step -------------------------------------------------------------------------------------------------

    @property
    def _window(self) -> int:
        return self.stepper.config.sliding_window

    def _step(self, everything: bool = False) -> None:
        able = [life for life in self.lives if life.request.left]
        chosen = [life for life in able if everything or self.sometimes(2)] or able[:1]
        if not chosen:
            return
        real, drafts = {}, {}
        for life in chosen:
            request = life.request
            left = request.prefill_len - request.computed
            real[life] = 1 if left <= 0 else left if everything and not self.sometimes(3) else self.choose(1, left)
            room = request.left - real[life]
            drafts[life] = min(self.choose(0, 3), room) if real[life] >= left else 0
        device = {life: real[life] + drafts[life] for life in chosen}
        host = self._host_lengths(device)
        accepted = {life: self.choose(0, drafts[life]) for life in chosen}
        for life in chosen:
            self._write_drafts(life, real[life] + accepted[life], device[life])
            self._expect(life, device[life])
            if accepted[life] < drafts[life]:
                self.seen["a rejected draft"] += 1
                self.seen["a rejected draft behind a prompt"] += life.request.is_prefilling
        self.seen["lengths that only the device knows"] += host != device
        order = sorted(chosen, key=lambda life: (host[life] != 1, host[life]))
        padding = self.choose(0, 2)
        report = self.stepper.step(
            [(life.request, host[life]) for life in order],
            pad_tokens=padding,
            device_query_lens=[device[life] for life in order],
        )
        self.seen["padding"] += padding > 0
        self.seen["a step without kept rows"] += report.skipped
        self.seen["a trimmed step"] += report.kept_rows is not None and 0 < len(report.kept_rows) < report.num_tokens
        for life in chosen:
            request = life.request
            request.computed += real[life] + accepted[life] - device[life]
            request.tokens[:] = life.ids

    def _host_lengths(self, device: dict[Life, int]) -> dict[Life, int]:
        """Lengths that the host believes: sometimes a draft moved from one decode to another on the device."""
        host = dict(device)
        decodes = [life for life in device if not life.request.is_prefilling]
        if len(decodes) > 1 and self.sometimes(2):
            longer, shorter = decodes[0], decodes[1]
            if host[longer] > 1:
                host[longer], host[shorter] = host[longer] - 1, host[shorter] + 1
        return host

    def _write_drafts(self, life: Life, right: int, count: int) -> None:
        """Wrong tokens from the ``right``-th of the step on."""
        for at in range(life.request.computed + right, life.request.computed + count):
            life.request.tokens[at] = (life.ids[at] + 1 + int(self.rng.integers(0, VOCABULARY - 1))) % VOCABULARY

    def _expect(self, life: Life, count: int) -> None:
        """What the policy says of the rows of this step."""
        request, state = life.request, self.stepper.state
        first, last = request.computed, request.computed + count
        begin = life.start
        if request.is_prefilling and not request.prompt_logprobs:
            if state.replay_settings.policy == "final":
                bound = request.prefill_len - state.replay_keep_last
                if bound - life.start >= state.replay_settings.min_saved:
                    begin = bound
            elif count > self._window:
                begin = max(min(last, request.prefill_len) - self._window, life.start)
                begin = begin if begin > first else life.start
        at = np.arange(first, last)
        life.kept[at] = at >= begin
        life.floor[at] = np.minimum(begin, at)

    # -- the end ------------------------------------------------------------------------------------------------

    def _check(self, life: Life) -> None:
        floors = dict.fromkeys(late_layers(self.stepper), life.floor[life.start :])
        assert life.request.ran[life.start :].all()
        assert life.request.kept.tolist() == life.kept.tolist()
        check_replay(life.request, life.run(floors), self.stepper.model.cut)
        # The replayed tokens of a hit left the cached entries as they were, bit for bit.
        for pages, found in zip(cacheable_pages(self.stepper, life.request, life.hit), life.pages):
            assert torch.equal(pages, found)
