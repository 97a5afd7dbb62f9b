"""The launchers against the reference: in the interpreter, or compiled where there is a GPU."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels import cases, reference
from tests.kernels.cases import STATES
from tests.kernels.reference import Step, random_step
from vllm_ascend_replay import kernels

# (seed, requests, longest request, rows of padding behind the step)
SHAPES = [(0, 1, 1, 0), (1, 1, 300, 5), (2, 2, 40, 0), (3, 7, 33, 1), (4, 30, 3, 17)]

# Results may not depend on how the work is cut: programs, rows and parts that divide nothing evenly.
CUTS = [
    {"programs": 1, "table_block": 16, "tile_bytes": 128, "gather_rows": 1, "gather_parts": 1, "scatter_rows": 1},
    {
        "programs": 3,
        "table_programs": 3,
        "table_block": 32,
        "tile_bytes": 512,
        "gather_rows": 8,
        "gather_parts": 3,
        "scatter_rows": 5,
    },
    {
        "programs": 7,
        "table_programs": 7,
        "table_block": 64,
        "tile_bytes": 256,
        "gather_rows": 3,
        "gather_parts": 2,
        "scatter_parts": 3,
    },
    {
        "programs": 48,
        "table_programs": 48,
        "table_block": 512,
        "tile_bytes": 16384,
        "gather_rows": 8,
        "gather_parts": 4,
        "scatter_rows": 16,
    },
]
if torch.cuda.is_available():
    CUTS = CUTS[1:2]  # each is compiled


@pytest.fixture(params=[None, *CUTS], ids=["default", *(f"cut{i}" for i in range(len(CUTS)))])
def cut(request, device, monkeypatch):
    """Every way of cutting the work that a test should see; the device's own first."""
    if request.param:
        changes = dict(request.param)
        monkeypatch.setitem(kernels._num_programs, device.type, changes.pop("programs"))
        monkeypatch.setitem(kernels._TUNING, device.type, dataclasses.replace(kernels.tuning(device), **changes))


@pytest.fixture
def launches(monkeypatch):
    """Grids of every launch, by kernel."""
    grids: list[tuple[str, tuple[int, ...]]] = []

    def watch(name):
        kernel = getattr(kernels, name)

        class Watched:
            def __getitem__(self, grid):
                grids.append((name, grid))
                return kernel[grid]

        monkeypatch.setattr(kernels, name, Watched())

    for name in [n for n in vars(kernels) if n.endswith("_kernel")]:
        watch(name)
    return grids


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("cut")
def test_gather_batch(shape, device):
    seed, *size = shape
    step = random_step(seed, *size)
    for padding in (0, 1, 37):
        cases.check_gather_batch(step, device=device, padding=padding, num_groups=1 + seed, seed=seed)
    cases.check_gather_batch(step, device=device, with_kv_start=False, seed=seed)
    cases.check_gather_batch(step, device=device, with_kv_start=False, uploads=True, padding=3, seed=seed)


def test_gather_batch_of_many_requests_and_groups(device):
    decodes = Step([1] * 512, [1] * 512)
    cases.check_gather_batch(decodes, device=device, num_groups=1, padding=3)
    cases.check_gather_batch(random_step(11, 129, 6), device=device, num_groups=12)


def test_gather_batch_of_padding_only(device):
    """A rank without kept rows beside one with some runs padding rows."""
    cases.check_gather_batch(Step([5, 9], [0, 0]), device=device, padding=4)


def test_gather_batch_writes_no_row_behind_its_buffers(device):
    """Device boundaries that keep more rows than the host sized the batch for are cut off, not written."""
    cases.check_gather_batch(Step([50, 30], [50, 30]), device=device, padding=-11)


def test_gather_batch_follows_the_device(device):
    """The host lists a request that the device's boundaries leave without rows."""
    rows = torch.full((6,), 77, device=device)
    boundaries = torch.full((4,), 77, dtype=torch.int32, device=device)
    positions = torch.arange(100, 110, device=device)
    kept_positions = torch.full((6,), 77, device=device)
    slots = torch.arange(20, device=device).view(2, 10)
    kept_slots = torch.full((2, 6), 77, device=device)
    as_int32 = {"dtype": torch.int32, "device": device}
    kernels.gather_batch(
        query_start_loc=torch.tensor([0, 1, 1, 6], **as_int32),  # the host believed [0, 1, 2, 7]
        dropped_before=torch.tensor([0, 0, 0, 3], **as_int32),
        requests=torch.tensor([0, 1, 2], **as_int32),
        positions=positions,
        slot_mappings=slots,
        rows=rows,
        boundaries=boundaries,
        kept_positions=kept_positions,
        kept_slot_mappings=kept_slots,
        num_padded=6,
    )
    assert boundaries.tolist() == [0, 1, 1, 3]
    assert rows.tolist() == [0, 4, 5, -1, -1, -1]
    assert kept_positions.tolist() == [100, 104, 105, 0, 0, 0]
    assert kept_slots.tolist() == [[0, 4, 5, -1, -1, -1], [10, 14, 15, -1, -1, -1]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("cut")
def test_gather_states(shape, device):
    seed, *size = shape
    step = random_step(seed, *size)
    states = STATES if seed == 0 else STATES[:4]  # ten: two launches
    cases.check_gather_states(step.rows + [-1] * (seed % 4), step.num_tokens, device=device, states=states, seed=seed)


@pytest.mark.usefixtures("cut")
def test_gather_states_in_any_order(device):
    """Only speed may depend on the rows lying in runs."""
    rng = random.Random(5)
    rows = [rng.choice([-1, rng.randrange(30)]) for _ in range(21)]
    # First and last of a block fit a run, what lies between does not.
    rows += [3, 9, 5, 6, 7, 8, 9, 10] * 2 + [-1, 4, -1, -1, -1, -1, -1, -1]
    cases.check_gather_states(rows, 30, device=device, states=STATES[1:3])


def test_gather_states_off_alignment(device):
    for offset in range(1, 9):
        cases.check_gather_states(range(3, 20), 21, device=device, states=STATES[:4], offset=offset)


def test_gather_states_of_nothing(device, launches):
    cases.check_gather_states([], 7, device=device)
    cases.check_scatter_rows(Step([], []), device=device)
    cases.check_gather_batch(Step([4], [0]), device=device)
    cases.check_pad_replayed_slots(Step([], []), device=device)
    cases.check_pad_replayed_slots(Step([3], [3]), device=device, groups=())
    assert launches == [], "zero rows must not launch"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("cut")
def test_scatter_rows(shape, device):
    seed, *size = shape
    step = random_step(seed, *size)
    cases.check_scatter_rows(step, device=device, states=STATES[: 1 + seed], seed=seed)  # five: two launches
    cases.check_scatter_rows(step, device=device, spare=-1, seed=seed)


def test_scatter_rows_of_many_requests(device):
    cases.check_scatter_rows(random_step(12, 512, 2, padding=3), device=device, states=STATES[1:2])


def test_scatter_rows_without_kept_rows(device):
    cases.check_scatter_rows(Step([5, 0, 9], [0, 0, 0], padding=4), device=device)


def test_scatter_rows_off_alignment(device):
    for offset in range(1, 9):
        cases.check_scatter_rows(random_step(3, 5, 20), device=device, offset=offset)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("cut")
def test_pad_replayed_slots(shape, device):
    seed, *size = shape
    for window in (1, 8, 130):
        cases.check_pad_replayed_slots(random_step(seed, *size), device=device, window=window, seed=seed)


def test_gather_then_scatter_is_the_identity_on_kept_rows(device):
    step = random_step(21, 9, 40, padding=2)
    hidden = reference.random_bits((step.num_tokens, 48), torch.bfloat16, 1).to(device)
    compact = torch.empty((step.num_kept, 48), dtype=hidden.dtype, device=device)
    kernels.gather_states(torch.tensor(step.rows, device=device), [hidden], [compact])
    out = torch.empty_like(hidden)
    kernels.scatter_rows(
        [compact],
        [out],
        query_start_loc=step.query_start_loc.to(device),
        dropped_before=step.dropped_before.to(device),
    )
    kept = torch.zeros(step.num_tokens, dtype=torch.bool)
    kept[step.rows] = True
    expected = torch.where(kept[:, None].to(device), hidden.view(torch.int16), 0)
    cases.equal_bits(out.view(torch.int16).cpu(), expected.cpu(), "round trip")


def test_one_launch_each_and_bounded_grids(device, launches, monkeypatch):
    monkeypatch.setitem(kernels._num_programs, device.type, 11)
    step = random_step(31, 9, 40)
    cases.check_gather_batch(step, device=device, num_groups=2)
    cases.check_gather_states(step.rows, step.num_tokens, device=device, states=STATES[:8])
    cases.check_scatter_rows(step, device=device, states=STATES[:4])
    cases.check_pad_replayed_slots(step, device=device)
    assert [name for name, _ in launches] == [
        "_gather_batch_kernel",
        "_gather_states_kernel",
        "_scatter_rows_kernel",
        "_pad_replayed_slots_kernel",
    ]
    assert all(len(grid) == 1 and 1 <= grid[0] <= 11 for _, grid in launches)


def test_launchers_run_nothing_but_the_kernel(device, monkeypatch):
    """No temporaries on the device, no copy to the host and no second kernel: only views of what was given."""

    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    for name in [n for n in vars(kernels) if n.endswith("_kernel")]:
        monkeypatch.setattr(kernels, name, Nothing())
    wide, mask = torch.zeros(9, 6, device=device), torch.zeros(9, dtype=torch.bool, device=device)
    slots = torch.zeros(2, 9, dtype=torch.int64, device=device)
    table = torch.zeros(3, dtype=torch.int32, device=device)
    kernels.num_programs(device)  # asks the driver once
    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.add(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        kernels.gather_batch(
            query_start_loc=table,
            dropped_before=table,
            requests=table,
            positions=slots[0],
            slot_mappings=slots,
            rows=slots[0],
            boundaries=table,
            kept_positions=slots[1],
            kept_slot_mappings=slots,
            num_padded=4,
        )
        kernels.gather_states(slots[0], [wide, mask], [wide, mask])
        kernels.scatter_rows([wide, mask], [wide, mask], query_start_loc=table, dropped_before=table)
        kernels.pad_replayed_slots(
            slots, groups=table, query_start_loc=table, positions=slots[0], replay_start=table, window=1
        )
    assert seen <= {"aten.select.int", "aten.view.dtype", "aten.detach.default"}, "more than views"
    with Watch():
        wide.clone()
    assert "aten.clone.default" in seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts stores in the interpreter")
@pytest.mark.usefixtures("cut")
def test_every_element_is_written_once(device, monkeypatch):
    """Not zeroed first and filled later: that would cost the bytes twice."""
    from triton.runtime import interpreter

    written: list[int] = []
    builder = interpreter.InterpreterBuilder
    store = builder.create_masked_store

    def watch(self, ptrs, value, mask, *args):
        written.extend(np.asarray(ptrs.data)[np.asarray(mask.data)].tolist())
        return store(self, ptrs, value, mask, *args)

    monkeypatch.setattr(builder, "create_masked_store", watch)
    step = random_step(3, 7, 33, padding=2)
    states = STATES[1:3]
    width = 4 + 1

    cases.check_scatter_rows(step, device=device, states=states)
    assert len(written) == len(set(written)) == step.num_tokens * width

    written.clear()
    cases.check_gather_states([*step.rows, -1, -1], step.num_tokens, device=device, states=states)
    assert len(written) == len(set(written)) == (step.num_kept + 2) * width

    written.clear()
    cases.check_gather_batch(step, device=device, num_groups=3, padding=9)
    per_request = 2 * len(step.requests) + 1
    assert len(written) == len(set(written)) == per_request + (step.num_kept + 9) * (1 + 1 + 3)


def test_bad_arguments_name_themselves(device):
    x = torch.zeros(4, 6, device=device)
    rows = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"states\[0\] must be contiguous"):
        kernels.gather_states(rows, [x[:, ::2]], [x.new_empty(2, 3)])
    with pytest.raises(ValueError, match=r"tensor 0: rows of torch.float32 \(6,\) cannot go into .* \(5,\)"):
        kernels.gather_states(rows, [x], [x.new_empty(2, 5)])
    with pytest.raises(ValueError, match="1 tensors cannot go into 0"):
        kernels.gather_states(rows, [x], [])
    for count in (0, 65536):
        with pytest.raises(ValueError, match=r"\[1, 65535\], got"):
            kernels.set_num_programs("npu", count)


def test_warm_up_launches_every_kernel_and_touches_one_row(device, launches):
    slots = reference.random_bits((3, 9), torch.int64, 1).to(device)
    before = slots.clone()
    rows, positions = cases.Canvas((5,), torch.int64, device), cases.Canvas((5,), torch.int64, device)
    boundaries = cases.Canvas((4,), torch.int32, device)
    starts = cases.Canvas((3,), torch.int32, device)
    kept_slots = cases.Canvas((3, 8), torch.int64, device)
    states = [torch.empty((0, *shape), dtype=dtype, device=device) for shape, dtype in STATES[:4]]
    kernels.warm_up(
        positions=torch.arange(9, device=device),
        slot_mappings=slots,
        rows=rows.tensor,
        boundaries=boundaries.tensor,
        kept_positions=positions.tensor,
        kept_slot_mappings=kept_slots.tensor,
        kept_kv_start=starts.tensor,
        groups=torch.tensor([0, 2], dtype=torch.int32, device=device),
        states=states,
        outputs=states[:2],
    )
    assert {name for name, _ in launches} == {name for name in vars(kernels) if name.endswith("_kernel")}
    assert torch.equal(slots, before)
    rows.check(torch.tensor([-1]), "rows")
    positions.check(torch.tensor([0]), "positions")
    boundaries.check(torch.tensor([0, 0], dtype=torch.int32), "boundaries")
    starts.check(torch.tensor([0], dtype=torch.int32), "kv_start")
    kept_slots.check(torch.full((3, 1), -1), "slots")


def test_programs_are_handed_in_at_warm_up(device, monkeypatch):
    monkeypatch.setattr(kernels, "_num_programs", {})
    asked = kernels.num_programs(device)
    assert asked >= 1
    buffer = torch.zeros((1, 16), dtype=torch.int64, device=device)
    kernels.warm_up(
        positions=buffer[0],
        slot_mappings=buffer,
        rows=torch.zeros_like(buffer[0]),
        boundaries=torch.zeros(2, dtype=torch.int32, device=device),
        kept_positions=torch.zeros_like(buffer[0]),
        kept_slot_mappings=torch.zeros_like(buffer),
        states=[buffer],
        outputs=[buffer],
        num_programs=asked + 3,
    )
    assert kernels.num_programs(device) == asked + 3


def test_grids_stay_below_what_ascend_starts(monkeypatch):
    """However many cores a driver counts; an NPU's grid is its cores."""
    monkeypatch.setattr(kernels, "_num_programs", {})
    monkeypatch.setattr(kernels, "_num_cores", lambda _: 1 << 20)
    for kind in ("npu", "cuda"):
        assert kernels.num_programs(SimpleNamespace(type=kind)) == 65535
    monkeypatch.setattr(kernels, "_num_cores", lambda _: 40)
    assert kernels.num_programs(SimpleNamespace(type="npu")) == 40


def test_cores_are_asked_of_the_driver(monkeypatch):
    """Ascend's driver counts vector cores, NVIDIA's multiprocessors; one that counts neither is an error."""
    properties: dict[str, int] = {}

    class Driver:
        class active:
            class utils:
                @staticmethod
                def get_device_properties(index):
                    assert index == 3
                    return properties

    monkeypatch.setattr(kernels.triton.runtime, "driver", Driver)
    device = torch.device("cuda", 3)
    for name, count in (("num_vectorcore", 48), ("multiprocessor_count", 132)):
        properties.clear()
        properties.update({"max_shared_mem": 1, "num_aicore": 24, name: count})
        kernels._num_cores.cache_clear()
        assert kernels._num_cores(device) == count
    properties.clear()
    kernels._num_cores.cache_clear()
    with pytest.raises(RuntimeError, match="set_num_programs"):
        kernels._num_cores(device)
    kernels._num_cores.cache_clear()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("num_reqs", "longest"), [(1, 16384), (7, 3000), (512, 60)])
def test_full_size(num_reqs, longest, device):
    """The model's widths, and widths that no vector access fits."""
    step = random_step(num_reqs, num_reqs, longest, padding=3)
    if num_reqs == 1:
        step = Step([longest], [8191])
    cases.check_gather_batch(step, device=device, num_groups=12, padding=5)
    cases.check_pad_replayed_slots(step, device=device, num_groups=12, groups=range(12), window=128)
    for hidden in (5120, 5119):
        states = [((4, hidden), torch.bfloat16), ((4,), torch.float32), ((), torch.int64), ((), torch.int32)]
        cases.check_gather_states([*step.rows, -1], step.num_tokens, device=device, states=states)
        cases.check_scatter_rows(step, device=device, states=[((hidden,), torch.bfloat16)] * 2)


@pytest.mark.gpu
@needs_gpu
def test_rows_behind_two_to_the_31_elements(device):
    rows, width = 110_000, 20480  # 2.25e9 elements
    states = torch.zeros((rows, width), dtype=torch.bfloat16, device=device)
    last = reference.random_bits((5, width), torch.int16, 1).view(torch.bfloat16).to(device)
    states[-5:] = last
    out = torch.empty_like(last)
    kernels.gather_states(torch.arange(rows - 5, rows, device=device), [states], [out])
    assert torch.equal(out.view(torch.int16), last.view(torch.int16))
    states.view(torch.int16).fill_(0x5A5A)
    boundaries = torch.tensor([0, rows], dtype=torch.int32, device=device)
    dropped = torch.tensor([0, rows - 5], dtype=torch.int32, device=device)
    kernels.scatter_rows([last], [states], query_start_loc=boundaries, dropped_before=dropped)
    assert torch.equal(states[-5:].view(torch.int16), last.view(torch.int16))
    assert not states[:-5].view(torch.int16).any()


@pytest.mark.gpu
@needs_gpu
def test_nothing_compiles_after_warm_up(device):
    """Whatever the batch, and wherever its buffers start."""
    compiled: list[str] = []
    hidden = torch.empty((0, 72), dtype=torch.bfloat16, device=device)
    mix = torch.empty((0, 4), dtype=torch.float32, device=device)
    ids = torch.empty((0,), dtype=torch.int32, device=device)
    states = [((72,), hidden.dtype), ((4,), mix.dtype), ((), ids.dtype)]
    slots = torch.zeros((2, 64), dtype=torch.int64, device=device)
    kernels.warm_up(
        positions=torch.zeros(64, dtype=torch.int64, device=device),
        slot_mappings=slots,
        rows=torch.zeros(64, dtype=torch.int64, device=device),
        boundaries=torch.zeros(9, dtype=torch.int32, device=device),
        kept_positions=torch.zeros(64, dtype=torch.int64, device=device),
        kept_slot_mappings=slots.clone(),
        kept_kv_start=torch.zeros(8, dtype=torch.int32, device=device),
        groups=torch.zeros(1, dtype=torch.int32, device=device),
        states=[hidden, mix, ids],
        outputs=[hidden],
    )
    runtime = kernels.triton.knobs.runtime
    runtime.jit_post_compile_hook = lambda **seen: compiled.append(seen["repr"])
    try:
        for seed in range(12):
            step = random_step(seed, 1 + 16 * seed, 1 + 16 * (seed % 3), padding=seed)
            cases.check_gather_batch(step, device=device, num_groups=2, padding=seed, seed=seed)
            cases.check_pad_replayed_slots(step, device=device, groups=(1,), window=1 + 15 * seed, seed=seed)
            for offset in (0, 1, 8):
                cases.check_gather_states(step.rows, step.num_tokens, device=device, states=states, offset=offset)
                cases.check_scatter_rows(step, device=device, states=states[:1], offset=offset)
        assert compiled == []
        # The hook sees compilations: another number of tensors is one.
        cases.check_gather_states([0], 1, device=device, states=states[:1])
        assert len(compiled) == 1
    finally:
        runtime.jit_post_compile_hook = None
