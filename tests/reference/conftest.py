"""Models, oracles and steppers that the tests of the reference model share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.oracle import Oracle
from tests.support.stepper import Stepper
from vllm_ascend_replay.reference.config import write_model


@pytest.fixture(scope="session")
def make_stepper(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Stepper, Oracle]]:
    """``make_stepper(preset, settings=..., **overrides)``: a fresh stepper in float64 and its oracle."""
    made: dict[str, tuple[Stepper, Oracle]] = {}

    def make(
        preset: str = "tiny", *, settings: dict[str, str] | None = None, stepper: Any = None, **overrides: Any
    ) -> tuple[Stepper, Oracle]:
        key = repr((preset, settings, stepper, sorted(overrides.items())))
        if key not in made:
            values = {"compute_dtype": "float64", **overrides}
            directory = write_model(tmp_path_factory.mktemp("model"), preset, **values)
            built = Stepper(directory, settings=settings, **(stepper or {}))
            made[key] = built, Oracle(built.config, built.model.weights())
        made[key][0].reset()
        return made[key]

    return make


@pytest.fixture
def tokens() -> Callable[..., list[int]]:
    """``tokens(count, seed)``: random token ids."""

    def draw(count: int, seed: int = 0, vocab: int = 97) -> list[int]:
        return np.random.default_rng(seed).integers(0, vocab, count).tolist()

    return draw
