"""Random schedules under every policy and number of kept rows; pages that hold nothing hold NaN."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.invariants.schedules import Schedule
from tests.invariants.support import CHUNK, EXACT, FINAL, keep

SETTINGS = {
    "final, window": FINAL,
    "final, exact": EXACT,
    "final, 11 rows": keep(11),
    "final, at least 20 rows saved": {**FINAL, "ASCEND_REPLAY_MIN_SAVED": "20"},
    "chunk": CHUNK,
}
EXAMPLES = 40
# No shrinking: a schedule takes long enough that a failure would hold up a run for minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def run_schedule(make_small, name, data) -> None:
    stepper, oracle = make_small(settings=SETTINGS[name])

    def choose(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    Schedule(stepper, oracle, choose, np.random.default_rng(choose(0, 1 << 20))).run()


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=EXAMPLES, phases=PHASES)
@given(data=st.data())
def test_random_schedules(make_small, name, data):
    run_schedule(make_small, name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=10 * EXAMPLES, phases=PHASES)
@given(data=st.data())
def test_many_random_schedules(make_small, name, data):
    run_schedule(make_small, name, data)
