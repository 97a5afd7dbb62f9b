"""Drives the real scheduler and runner, poisons every page handed out and remembers every row by position."""

from dataclasses import dataclass, field

import torch


def tokens(n, seed=0, low=2, high=200):
    """n pseudo-random token ids in [low, high)."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (n,), generator=g).tolist()


def cache_tensors(cache):
    """Every tensor with data in a (nested) list of cache planes."""
    if torch.is_tensor(cache):
        if cache.numel():
            yield cache
    elif isinstance(cache, (list, tuple)):
        for c in cache:
            yield from cache_tensors(c)


def poison(rank):
    """Fills every cache byte with 0xFF: NaN in each float format used here."""
    for layer in rank.layers.values():
        for cache in cache_tensors(getattr(layer, "kv_cache", None)):
            cache.untyped_storage().fill_(0xFF)


@dataclass
class Rows:
    """What one step computed of one request."""

    epoch: int
    """Which (re)start of the request, counted from 0."""
    positions: torch.Tensor
    """int64 [q]."""
    hidden: torch.Tensor
    """[q, H] final hidden states."""
    floor: torch.Tensor
    """int64 [q]: first position the late layers' window may see; 0: unbounded."""
    keep: torch.Tensor
    """bool [q]: rows that the replay layers ran."""


@dataclass
class Draft:
    """What a drafter proposed after a step that sampled; n tokens of a block."""

    tokens: torch.Tensor
    """int64 [n]."""
    hidden: torch.Tensor
    """[n, H], what the drafter's head reads."""


@dataclass
class Trace:
    """One request's life."""

    ids: list
    """Prompt and output tokens so far."""
    prompt: int
    """Prompt length."""
    hits: list = field(default_factory=list)
    """Computed tokens at each (re)start: the prefix hit."""
    rows: list[Rows] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    """One for each step that sampled, in order; empty without a drafter."""

    def row(self, pos):
        """Last hidden row [H] computed for a position, None if it was dropped or never computed."""
        for r in reversed(self.rows):
            at = (r.positions == pos).nonzero()
            if len(at):
                return r.hidden[at[0, 0]] if r.keep[at[0, 0]] else None
        return None

    @property
    def output(self):
        return self.ids[self.prompt :]


@dataclass
class Step:
    """One step of the runner."""

    rows: int
    kept: int
    """Rows the replay layers ran; -1 without a replay batch."""
    reqs: int


class Session:
    """A `Rank` with poisoned pages, and the traces of the requests it served.

    Every page is poisoned again whenever the block pool hands it out, so recycled pages hold no stale numbers.
    """

    def __init__(self, rank):
        self.rank, self.steps, self.traces, self.plan = rank, [], {}, None
        self._pages = [t for layer in rank.layers.values() for t in cache_tensors(getattr(layer, "kv_cache", None))]
        self._fresh = []
        poison(rank)
        pool = rank.scheduler.kv_cache_manager.block_pool
        new = pool.get_new_blocks

        def get_new_blocks(n):
            blocks = new(n)
            self._fresh += [b.block_id for b in blocks]
            return blocks

        pool.get_new_blocks = get_new_blocks
        rank.before_execute = self._before
        build = getattr(rank.state, "_build_replay", None)
        if build is not None:

            def record(step, plan, agreement):
                self.plan = plan
                return build(step, plan, agreement)

            rank.state._build_replay = record
        self._block = None
        if rank.drafter is not None:
            sample = rank.drafter._sample_sequential

            def keep(num_reqs, hidden):
                self._block = hidden
                return sample(num_reqs, hidden)

            rank.drafter._sample_sequential = keep

    def _before(self, out):
        ids, self._fresh = torch.tensor(sorted(set(self._fresh)), dtype=torch.long), []
        for t in self._pages:
            t[ids] = float("nan") if t.is_floating_point() else (255 if t.dtype == torch.uint8 else -1)
        self.plan = None

    def reset(self):
        """Forgets cached prefixes and poisons everything."""
        if self.rank.scheduler.kv_cache_manager.enable_caching:
            assert self.rank.scheduler.reset_prefix_cache()
        poison(self.rank)

    def run(self, requests, chunk=None, max_tokens=4, arrivals=None, each_step=None, **sampling):
        """Serves `requests` (name -> prompt token ids) to the end and returns the steps it took.

        Args:
            chunk: token budget of a step.
            arrivals: name -> step at which the request arrives; default 0.
            each_step: called with the session after each step.
        """
        rank, arrivals, waiting, number = self.rank, arrivals or {}, dict(requests), 0
        if chunk is not None:
            rank.scheduler.max_num_scheduled_tokens = chunk
        for name, ids in requests.items():
            self.traces[name] = Trace(list(ids), len(ids))
        first = len(self.steps)
        while waiting or rank.scheduler.has_unfinished_requests():
            for name in [k for k in waiting if arrivals.get(k, 0) <= number]:
                rank.add(name, waiting.pop(name), max_tokens=max_tokens, **sampling)
            number += 1
            if not rank.scheduler.has_unfinished_requests():
                continue
            self.step()
            if each_step is not None:
                each_step(self)
        return self.steps[first:]

    def step(self):
        """One step of the engine; records its rows."""
        requests = dict(self.rank.scheduler.requests)
        out, state, result = self.rank.step()
        for new in out.scheduled_new_reqs:
            self.traces[new.req_id].hits.append(new.num_computed_tokens)
        if state is None:
            return
        batch, plan = state.input_batch, self.plan
        self.steps.append(Step(batch.num_tokens, -1 if plan is None else plan.num_rows, batch.num_reqs))
        for i, name in enumerate(batch.req_ids):
            lo, hi = int(batch.query_start_loc_np[i]), int(batch.query_start_loc_np[i + 1])
            floor, keep = torch.zeros(hi - lo, dtype=torch.long), torch.ones(hi - lo, dtype=torch.bool)
            if plan is not None:
                keep[: hi - lo - int(plan.kept_lens[i])] = False
                floor[keep] = int(plan.kv_start[i])
            t = self.traces[name]
            t.ids = list(requests[name].all_token_ids)
            # The last token has no row yet; rows from there on are drafts that did not stand.
            positions = batch.positions[lo:hi]
            n = int((positions < len(t.ids) - 1).sum())
            hidden = state.hidden_states[lo:hi]
            t.rows.append(Rows(len(t.hits) - 1, positions[:n].clone(), hidden[:n].clone(), floor[:n], keep[:n]))
            if self._block is not None and result.sampled_token_ids[result.req_id_to_index[name]]:
                tokens = self.rank.drafter.draft_tokens[i].clone()
                t.drafts.append(Draft(tokens, self._block[i * len(tokens) : (i + 1) * len(tokens)].clone()))

    def preempt(self, name):
        """Preempts a running request, as the scheduler does when it runs out of blocks."""
        import time

        scheduler = self.rank.scheduler
        request = scheduler.requests[name]
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
