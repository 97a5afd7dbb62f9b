"""What the kernels must compute, in plain PyTorch and row by row; and batches to compute it on."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

PAD = -1


@dataclass
class Step:
    """A step of ``R`` requests as plain lists; the request ``r`` keeps the last ``kept[r]`` of its rows."""

    lens: list[int]
    kept: list[int]
    padding: int = 0
    """Rows of the step behind its last request."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lens) + self.padding

    @property
    def num_kept(self) -> int:
        return sum(self.kept)

    @property
    def query_start_loc(self) -> torch.Tensor:
        return _sums(self.lens)

    @property
    def dropped_before(self) -> torch.Tensor:
        return _sums([n - k for n, k in zip(self.lens, self.kept)])

    @property
    def requests(self) -> list[int]:
        return [r for r, k in enumerate(self.kept) if k]

    @property
    def rows(self) -> list[int]:
        """Step row of every kept row."""
        rows, end = [], 0
        for n, k in zip(self.lens, self.kept):
            end += n
            rows += range(end - k, end)
        return rows


def _sums(values: list[int]) -> torch.Tensor:
    return torch.cumsum(torch.tensor([0, *values]), 0).to(torch.int32)


def random_step(seed: int, num_reqs: int, max_len: int, padding: int = 0) -> Step:
    """Decodes, whole prompts, bounded prompts, prompts without kept rows and requests without rows, in any order."""
    rng = random.Random(seed)
    lens, kept = [], []
    for _ in range(num_reqs):
        n = rng.choice([1, 1, 2, rng.randint(0, max_len), rng.randint(1, max_len)])
        lens.append(n)
        kept.append(rng.choice([n, n, 0, min(n, 8), rng.randint(0, n)]))
    return Step(lens, kept, padding)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern of the dtype: NaNs with payloads, infinities, denormals, extreme integers."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(torch.tensor(shape).prod())
    bits = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        bits = bits & 1
    return bits.view(dtype).view(shape)


def gather_batch(
    step: Step, positions: torch.Tensor, slots: torch.Tensor, kv_start: torch.Tensor, num_padded: int
) -> dict[str, torch.Tensor]:
    """Everything that the gather of the replay batch writes."""
    rows = step.rows[:num_padded]
    pad = num_padded - len(rows)
    at = torch.tensor(rows, dtype=torch.int64)
    begins, total = [], 0
    for kept in step.kept:
        if kept:
            begins.append(total)
        total += kept
    return {
        "rows": torch.cat([at, torch.full((pad,), PAD)]),
        "boundaries": torch.tensor([*begins, total], dtype=torch.int32),
        "kept_positions": torch.cat([positions[at], torch.zeros(pad, dtype=torch.int64)]),
        "kept_slot_mappings": torch.cat([slots[:, at], torch.full((len(slots), pad), PAD)], dim=1),
        "kept_kv_start": kv_start.clone(),
    }


def gather_states(rows: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
    out = []
    for state in states:
        target = torch.zeros((len(rows), *state.shape[1:]), dtype=state.dtype)
        for k, row in enumerate(rows.tolist()):
            if row != PAD:
                target[k] = state[row]
        out.append(target)
    return out


def scatter_rows(step: Step, values: list[torch.Tensor]) -> list[torch.Tensor]:
    out = []
    for value in values:
        target = torch.zeros((step.num_tokens, *value.shape[1:]), dtype=value.dtype)
        for k, row in enumerate(step.rows[: len(value)]):
            target[row] = value[k]
        out.append(target)
    return out


def pad_replayed_slots(
    step: Step, slots: torch.Tensor, groups: list[int], positions: torch.Tensor, starts: list[int], window: int
) -> torch.Tensor:
    out = slots.clone()
    begin = 0
    for n, start in zip(step.lens, starts):
        for t in range(begin, begin + n):
            if start and start <= int(positions[t]) < start + window:
                for group in groups:
                    out[group, t] = PAD
        begin += n
    return out
