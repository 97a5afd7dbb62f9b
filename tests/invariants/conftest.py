"""Models, oracles and steppers of the reference model, and small variants of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.reference.conftest import make_stepper, tokens

__all__ = ["make_small", "make_stepper", "make_window_128", "tokens"]

# Two layers after the cut, the second of them an index source: the least in which all that replay touches happens.
SMALL = dict(
    compress_ratios=(0, 2, 1, 1, 1),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2, 4),
    candidate_source_layer_id=2,
    engram_layer_ids=(1,),
    aux_hidden_state_layers=(1, 3, 4),
)


@pytest.fixture(scope="session")
def make_small(make_stepper: Callable[..., Any]) -> Callable[..., Any]:
    """``make_small(settings=...)``: five layers, window 8, pages of 4 tokens."""
    limits = dict(block_size=4, max_num_reqs=8, max_num_tokens=256, max_model_len=128, num_blocks=256)
    return partial(make_stepper, stepper=limits, **SMALL)


@pytest.fixture(scope="session")
def make_window_128(make_stepper: Callable[..., Any]) -> Callable[..., Any]:
    """``make_window_128(settings=...)``: five layers, window 128, prompts of up to 2048 tokens."""
    limits = dict(max_num_reqs=4, max_num_tokens=2048, max_model_len=2048, num_blocks=1024)
    return partial(make_stepper, stepper=limits, sliding_window=128, swa_block_size=32, **SMALL)
