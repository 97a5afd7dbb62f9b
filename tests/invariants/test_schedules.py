"""Random schedules under every policy and number of kept rows; pages that hold nothing hold NaN."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.invariants.schedules import FEATURES, Schedule
from tests.invariants.support import CHUNK, EXACT, FINAL, keep

SETTINGS = {
    "final, window": FINAL,
    "final, exact": EXACT,
    "final, 11 rows": keep(11),
    "final, at least 20 rows saved": {**FINAL, "ASCEND_REPLAY_MIN_SAVED": "20"},
    "chunk": CHUNK,
}
EXAMPLES = 40
# No shrinking: a failing seed says all, and its neighbours are other schedules.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def run_schedules(make_small, name: str, examples: int) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=examples, phases=PHASES)
    @given(seed=st.integers(0, (1 << 32) - 1))
    def run(seed: int) -> None:
        schedule = Schedule(*make_small(settings=SETTINGS[name]), seed)
        schedule.run()
        seen.update(schedule.seen)

    run()
    expected = set(FEATURES) - ({"a step without kept rows"} if name == "chunk" else set())
    assert not expected - {feature for feature, count in seen.items() if count}, seen


@pytest.mark.parametrize("name", SETTINGS)
def test_random_schedules(make_small, name):
    run_schedules(make_small, name, EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_many_random_schedules(make_small, name):
    run_schedules(make_small, name, 10 * EXAMPLES)
