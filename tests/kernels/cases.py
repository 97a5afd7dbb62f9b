"""Cases for the launchers: poisoned outputs with margins, compared with the reference bit for bit.

One set of cases for everything that can run the kernels: Triton's interpreter, a GPU, and the code that was lowered
for Ascend (``tools/check_kernels``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from tests.kernels import reference
from tests.kernels.reference import Step, random_bits
from vllm_ascend_replay import kernels

POISON = 0x5A
MARGIN = 64

# What crosses the cut of a DeepSeek-V4.1: streams [T, hc, H], their mix [T, hc], positions, token ids. Then the odd
# ones: rows of one byte, of no multiple of 16 bytes, of several dimensions.
STATES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((4, 37), torch.bfloat16),
    ((4,), torch.float32),
    ((), torch.int64),
    ((), torch.int32),
    ((3, 5, 2), torch.float16),
    ((9,), torch.float8_e4m3fn),
    ((), torch.bool),
    ((64,), torch.bfloat16),
    ((7,), torch.int16),
    ((1,), torch.float64),
]


class Canvas:
    """A poisoned output inside margins that must stay poisoned."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, offset: int = 0) -> None:
        """``offset``: elements by which the output is moved off its alignment."""
        self.size = torch.empty(0, dtype=dtype).element_size()
        count = 1
        for n in shape:
            count *= n
        self.begin = (MARGIN + offset) * self.size
        self.end = self.begin + count * self.size
        self.bytes = torch.full((self.end + MARGIN * self.size,), POISON, dtype=torch.uint8, device=device)
        self.tensor = self.bytes[self.begin : self.end].view(dtype).view(shape)

    def check(self, expected: torch.Tensor, what: str) -> None:
        """``expected`` are the leading elements of the output; the rest and the margins must be untouched."""
        got = self.tensor.cpu()
        want = torch.full_like(self.bytes, POISON, device="cpu")
        target = want[self.begin : self.end].view(got.dtype).view(got.shape)
        target[tuple(slice(0, n) for n in expected.shape)] = expected
        equal_bits(self.bytes.cpu(), want, what)


def equal_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    got, want = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    if not torch.equal(got, want):
        bad = (got != want).nonzero().flatten()
        raise AssertionError(f"{what}: {len(bad)} of {got.numel()} bytes differ, the first at {bad[0]}")


def check_gather_batch(
    step: Step,
    *,
    device: torch.device,
    num_groups: int = 3,
    padding: int = 0,
    with_kv_start: bool = True,
    uploads: bool = False,
    seed: int = 0,
) -> None:
    """``padding``: rows of the replay batch that the device's boundaries do not fill; negative: they overfill it.

    ``uploads``: the kernel copies the host's tables, and reads them at their source.
    """
    tokens = step.num_tokens
    num_padded = max(step.num_kept + padding, 0)
    count = len(step.requests)
    positions = random_bits((tokens,), torch.int64, seed)
    slots = random_bits((num_groups, tokens), torch.int64, seed + 1)
    if tokens:
        slots[0, -1] = torch.iinfo(torch.int64).max
    kv_start = random_bits((count,), torch.int32, seed + 2)
    expected = reference.gather_batch(step, positions, slots, kv_start, num_padded)
    # Groups start at a multiple of 32 bytes, as Ascend wants it.
    stride = -(-num_padded // 4) * 4 + 24
    out = {
        "rows": Canvas((num_padded + 3,), torch.int64, device),
        "boundaries": Canvas((count + 1,), torch.int32, device),
        "kept_positions": Canvas((num_padded,), torch.int64, device),
        "kept_slot_mappings": Canvas((num_groups, stride), torch.int64, device),
    }
    extra = {}
    if with_kv_start:
        out["kept_kv_start"] = Canvas((count,), torch.int32, device)
        extra["kv_start"] = kv_start.to(device)
    # The host's tables are slices of one upload, at any address.
    upload = torch.cat([torch.tensor([7]), step.dropped_before, torch.tensor(step.requests)]).to(torch.int32).to(device)
    num_reqs = len(step.lens)
    dropped_before, requests = upload[1 : num_reqs + 2], upload[num_reqs + 2 :]
    if uploads:
        # More than both tables, as `ReplayBuffers` packs it; nobody may read its copy before it is there.
        source = torch.cat((upload[1:], torch.full((600,), 11, dtype=torch.int32, device=device)))
        out["copy"] = Canvas(tuple(source.shape), torch.int32, device)
        expected["copy"] = source.cpu()
        extra["upload"] = source, out["copy"].tensor
        dropped_before, requests = dropped_before.clone().fill_(-5), requests.clone().fill_(-5)
    kernels.gather_batch(
        query_start_loc=step.query_start_loc.to(device),
        dropped_before=dropped_before,
        requests=requests,
        positions=positions.to(device),
        slot_mappings=slots.to(device),
        num_padded=num_padded,
        **extra,
        **{name: canvas.tensor for name, canvas in out.items() if name != "copy"},
    )
    for name, canvas in out.items():
        canvas.check(expected[name] if num_padded else expected[name][..., :0], f"gather_batch {name}")


def check_gather_states(
    rows: Sequence[int],
    num_tokens: int,
    *,
    device: torch.device,
    states: Sequence[tuple[tuple[int, ...], torch.dtype]] = tuple(STATES),
    spare: int = 2,
    offset: int = 0,
    seed: int = 0,
) -> None:
    """``spare``: rows of the outputs behind the gathered ones."""
    sources = [random_bits((num_tokens, *shape), dtype, seed + i) for i, (shape, dtype) in enumerate(states)]
    table = torch.tensor(list(rows), dtype=torch.int64)
    out = [Canvas((len(table) + spare, *shape), dtype, device, offset) for shape, dtype in states]
    kernels.gather_states(table.to(device), [s.to(device) for s in sources], [canvas.tensor for canvas in out])
    for i, (canvas, expected) in enumerate(zip(out, reference.gather_states(table, sources))):
        canvas.check(expected, f"gather_states {i} {states[i]}")


def check_scatter_rows(
    step: Step,
    *,
    device: torch.device,
    states: Sequence[tuple[tuple[int, ...], torch.dtype]] = tuple(STATES[:3]),
    spare: int = 1,
    offset: int = 0,
    seed: int = 0,
) -> None:
    """``spare``: values behind the kept ones; negative: kept rows without a value."""
    count = max(step.num_kept + spare, 0)
    values = [random_bits((count, *shape), dtype, seed + i) for i, (shape, dtype) in enumerate(states)]
    out = [Canvas((step.num_tokens, *shape), dtype, device, offset) for shape, dtype in states]
    kernels.scatter_rows(
        [value.to(device) for value in values],
        [canvas.tensor for canvas in out],
        query_start_loc=step.query_start_loc.to(device),
        dropped_before=step.dropped_before.to(device),
    )
    for i, (canvas, expected) in enumerate(zip(out, reference.scatter_rows(step, values))):
        canvas.check(expected, f"scatter_rows {i} {states[i]}")


def check_pad_replayed_slots(
    step: Step,
    *,
    device: torch.device,
    num_groups: int = 4,
    groups: Sequence[int] = (0, 2),
    window: int = 8,
    seed: int = 0,
) -> None:
    rng = random.Random(seed)
    tokens = step.num_tokens
    firsts = [rng.randint(0, 50) for _ in step.lens]
    starts = [rng.choice([0, max(first - 3, 1), first + rng.randint(1, 2 * window + 2)]) for first in firsts]
    parts = [torch.arange(first, first + n) for first, n in zip(firsts, step.lens)]
    # Behind the last request anything may stand.
    positions = torch.cat([*parts, random_bits((step.padding,), torch.int64, seed + 1)])
    slots = random_bits((num_groups, tokens), torch.int64, seed + 2)
    expected = reference.pad_replayed_slots(step, slots, list(groups), positions, starts, window)
    canvas = Canvas((num_groups, -(-tokens // 4) * 4 + 8), torch.int64, device)
    view = canvas.tensor[:, :tokens]
    view.copy_(slots)
    kernels.pad_replayed_slots(
        view,
        groups=torch.tensor(list(groups), dtype=torch.int32, device=device),
        query_start_loc=step.query_start_loc.to(device),
        positions=positions.to(device),
        replay_start=torch.tensor(starts, dtype=torch.int32, device=device),
        window=window,
    )
    canvas.check(expected, "pad_replayed_slots")
