"""Every kernel of the package: what it writes, and the launches that are checked and run."""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.kernels import cases
from tests.kernels.reference import Step, random_step
from tools.check_kernels.lowering import Rejected, Specialisation, jit_functions, parameter_names
from tools.check_kernels.simulation import specialise
from vllm_ascend_replay import kernels

CPU = torch.device("cpu")
HIDDEN = 5120
STREAMS = 4

# What crosses the cut of DeepSeek-V4.1, in its size.
MODEL_STATES = [
    ((STREAMS, HIDDEN), torch.bfloat16),
    ((STREAMS,), torch.float32),
    ((), torch.int64),
    ((), torch.int32),
]

# As many wide tensors as one launch takes, of every type: the most local memory that the launchers can ask for.
WIDE_STATES = [
    ((2048,), dtype)
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.int32, torch.float16, torch.int16, torch.bool)
] + [((2048,), torch.float64)]

Case = Callable[[], None]


@dataclass(frozen=True)
class Entry:
    """One kernel: the pointers that it may write, and cases that launch it."""

    outputs: frozenset[str]
    cases: Callable[[], Iterator[tuple[str, Case]]]


def _steps(count: int, seed: int) -> Iterator[tuple[str, Step, int]]:
    """Random batches and the ends of the range."""
    yield "one row", Step([1], [1]), 1
    yield "512 decodes", Step([1] * 512, [1] * 512), 40
    yield "512 requests", random_step(seed, 512, 4, padding=5), 48
    yield "one prompt", Step([1500], [1337]), 40
    yield "no kept rows", Step([17, 5], [0, 0], padding=3), 3
    for i in range(count):
        rng = random.Random(seed + i)
        step = random_step(seed + i, rng.randint(1, 40), rng.choice([3, 70, 600]), rng.randint(0, 20))
        yield f"random {i}", step, rng.randint(1, 72)


def _with_programs(count: int, case: Case) -> None:
    before = dict(kernels._num_programs)
    kernels.set_num_programs("cpu", count)
    try:
        case()
    finally:
        kernels._num_programs.clear()
        kernels._num_programs.update(before)


def _gather_batch_cases() -> Iterator[tuple[str, Case]]:
    for seed, (name, step, programs) in enumerate(_steps(12, 100)):
        for groups, padding, kv_start in ((1, 0, False), (5, 37, True), (12, 4, True), (5, -1, True)):
            case = partial(
                cases.check_gather_batch,
                step,
                device=CPU,
                num_groups=groups,
                padding=padding,
                with_kv_start=kv_start,
                seed=seed,
            )
            yield f"{name}, {groups} groups, {padding} rows of padding", partial(_with_programs, programs, case)


def _gather_states_cases() -> Iterator[tuple[str, Case]]:
    rng = random.Random(1)
    for seed, (name, step, programs) in enumerate(_steps(12, 200)):
        rows = step.rows + [cases.reference.PAD] * (seed % 11)
        for states in (cases.STATES[:4], cases.STATES[2:]):
            case = partial(cases.check_gather_states, rows, step.num_tokens, device=CPU, states=states, seed=seed)
            yield f"{name}, {len(states)} states", partial(_with_programs, programs, case)
    rows = [rng.choice([cases.reference.PAD, rng.randrange(30)]) for _ in range(99)]
    yield "any order", partial(cases.check_gather_states, rows, 30, device=CPU, states=cases.STATES[:4])
    rows = [*range(3, 24), *range(40, 59), cases.reference.PAD]
    for name, states in (("model", MODEL_STATES), ("eight wide states", WIDE_STATES)):
        case = partial(cases.check_gather_states, rows, 60, device=CPU, states=states)
        yield name, partial(_with_programs, 40, case)


def _scatter_rows_cases() -> Iterator[tuple[str, Case]]:
    for seed, (name, step, programs) in enumerate(_steps(12, 300)):
        for count, spare in ((1, 0), (5, 3), (1, -2)):
            case = partial(
                cases.check_scatter_rows,
                step,
                device=CPU,
                states=cases.STATES[:count],
                spare=spare,
                seed=seed,
            )
            yield f"{name}, {count} tensors, {spare} values spare", partial(_with_programs, programs, case)
    hidden = [((HIDDEN,), torch.bfloat16)]
    for states in (hidden, hidden * 4, WIDE_STATES[:4]):
        case = partial(cases.check_scatter_rows, Step([70, 33, 20], [40, 33, 0], 7), device=CPU, states=states)
        yield f"{len(states)} wide tensors", partial(_with_programs, 40, case)


def _pad_replayed_slots_cases() -> Iterator[tuple[str, Case]]:
    for seed, (name, step, programs) in enumerate(_steps(12, 400)):
        for groups, window in (((0,), 1), ((0, 2), 8), ((3, 1, 0, 2), 128)):
            case = partial(cases.check_pad_replayed_slots, step, device=CPU, groups=groups, window=window, seed=seed)
            yield f"{name}, groups {groups}, window {window}", partial(_with_programs, programs, case)
    case = partial(cases.check_pad_replayed_slots, Step([90, 4], [0, 0]), device=CPU, num_groups=12, groups=range(12))
    yield "twelve groups", case


KERNELS = {
    "_gather_batch_kernel": Entry(
        frozenset({"rows_ptr", "boundaries_ptr", "kept_positions_ptr", "kept_slots_ptr", "kept_kv_start_ptr"}),
        _gather_batch_cases,
    ),
    "_gather_states_kernel": Entry(frozenset(f"target{i}_ptr" for i in range(8)), _gather_states_cases),
    "_scatter_rows_kernel": Entry(frozenset(f"target{i}_ptr" for i in range(4)), _scatter_rows_cases),
    "_pad_replayed_slots_kernel": Entry(frozenset({"slots_ptr"}), _pad_replayed_slots_cases),
}


def check_complete(module: Any = kernels) -> None:
    """Every ``@triton.jit`` function is a registered kernel or called by one.

    Raises:
        Rejected: a kernel is not registered, or a registered one is gone.
    """
    functions = jit_functions(module)
    gone = KERNELS.keys() - functions.keys()
    if gone:
        raise Rejected(f"registered but not in {module.__name__}: {', '.join(sorted(gone))}")
    seen: set[str] = set()
    todo = list(KERNELS)
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        tree = ast.parse(textwrap.dedent(inspect.getsource(functions[name].fn)))
        called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
        todo += called & functions.keys()
    missing = sorted(functions.keys() - seen)
    if missing:
        raise Rejected(f"not registered in tools/check_kernels/registry.py: {', '.join(missing)}")


def use_ascend_tuning() -> None:
    """Make the launchers cut their work on the CPU as they do on an NPU."""
    kernels._TUNING["cpu"] = kernels._TUNING["npu"]


class _Recorder:
    """Stands in for a kernel and only notes what Triton would compile."""

    def __init__(self, kernel: Any, seen: set[Specialisation]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*positional: Any, **named: Any) -> None:
            arguments = {**dict(zip(parameter_names(self.kernel), positional)), **named}
            self.seen.add(specialise(self.kernel, arguments)[0])

        return launch


def check_warm_up() -> None:
    """What a configuration launches while serving was compiled by `kernels.warm_up`, whatever the batch.

    Raises:
        Rejected: a step would compile.
    """
    seen: set[Specialisation] = set()
    originals = {name: getattr(kernels, name) for name in KERNELS}
    for name, kernel in originals.items():
        setattr(kernels, name, _Recorder(kernel, seen))
    try:
        slots = torch.zeros((5, 256), dtype=torch.int64)
        states = [torch.empty((0, *shape), dtype=dtype) for shape, dtype in MODEL_STATES]
        groups = torch.tensor([0, 3], dtype=torch.int32)
        kernels.warm_up(
            positions=slots[0],
            slot_mappings=slots,
            rows=slots[1],
            boundaries=torch.zeros(9, dtype=torch.int32),
            kept_positions=slots[2],
            kept_slot_mappings=slots.clone(),
            kept_kv_start=torch.zeros(8, dtype=torch.int32),
            groups=groups,
            states=states,
            outputs=[states[0][:, 0]],
        )
        warm = set(seen)
        assert len(warm) == len(KERNELS), "warm-up left a kernel out"
        for _, step, _ in _steps(20, 500):
            empty = {"dtype": torch.int32}
            table = torch.zeros(1 + len(step.lens), **empty)
            for padding in (0, 1, 17):
                kernels.gather_batch(
                    query_start_loc=table,
                    dropped_before=table,
                    requests=table[: len(step.requests)],
                    positions=slots[0],
                    slot_mappings=slots[:, 3:],
                    rows=slots[1, 1:],
                    boundaries=table,
                    kept_positions=slots[2],
                    kept_slot_mappings=slots[:, :100],
                    num_padded=step.num_kept + padding,
                    kv_start=table,
                    kept_kv_start=table,
                )
            rows = torch.zeros(step.num_kept, dtype=torch.int64)
            kernels.gather_states(rows, states, [state.new_empty((9, *state.shape[1:])) for state in states])
            hidden = torch.empty((step.num_tokens, HIDDEN), dtype=torch.bfloat16)
            kernels.scatter_rows([hidden[:7]], [hidden], query_start_loc=table, dropped_before=table)
            kernels.pad_replayed_slots(
                slots,
                groups=groups,
                query_start_loc=table,
                positions=slots[0],
                replay_start=table,
                window=1 + len(step.lens),
            )
        if seen != warm:
            cold = (seen - warm).pop()
            raise Rejected(f"a step compiles {cold.kernel.__name__} for {dict(cold.constants)}")
    finally:
        for name, kernel in originals.items():
            setattr(kernels, name, kernel)
