"""What the counters cost a step, on this machine: the best of several rounds, since the machine may be busy."""

from __future__ import annotations

import timeit

from vllm_ascend_replay import stats

STEPS = 20_000
ROUNDS = 20


def main() -> None:
    counters = stats.current()
    cases = {
        "a trimmed step": lambda: counters.count_replay(4096, 128, 0, graph=True),
        "a step in full": lambda: counters.count_full(4096, "no prompt of the step is bounded"),
        "a step without a prefill": lambda: counters.count_full(8),
    }
    for name, count in cases.items():
        microseconds = min(timeit.repeat(count, number=STEPS, repeat=ROUNDS)) / STEPS * 1e6
        print(f"{name}: {microseconds:.2f} us")


if __name__ == "__main__":
    main()
