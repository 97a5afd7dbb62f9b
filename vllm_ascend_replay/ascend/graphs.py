"""What the replay graphs need of vllm-ascend: its breakable wrapper, its dummy batches, its limits on captures."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig

from vllm_ascend_replay.graphs import GraphHost
from vllm_ascend_replay.tail import ReplayTail

STREAMS = 1800
"""Streams of an NPU that captured pieces may take, each for good (error 207008 beyond)."""


def make_graph_host(vllm_config: VllmConfig, tail: ReplayTail, device: torch.device) -> GraphHost:
    """The `GraphHost` of vllm-ascend's DeepSeek-V4.1.

    Between attention calls, which are eager breaks, its layers read streams, pre mix, token ids and the MC2 mask.
    """
    from vllm_ascend.ascend_forward_context import get_mc2_mask
    from vllm_ascend.compilation.breakable_aclgraph import BreakableACLGraphWrapper
    from vllm_ascend.worker.v2.input_batch import AscendInputBatch
    from vllm_ascend.worker.v2.utils import communicator_switch

    return GraphHost(
        states=crossing_states(vllm_config, device),
        wrapper=BreakableACLGraphWrapper,
        make_dummy_batch=AscendInputBatch.make_dummy,
        capturing=communicator_switch,
        watched={} if get_mc2_mask() is None else {"the MC2 mask": get_mc2_mask},
        can_capture=lambda rows: not exchanges_through_host(vllm_config, rows),
        streams=STREAMS,
        comm_groups=communication_groups(vllm_config),
        model_pieces=model_pieces(vllm_config, tail),
    )


def crossing_states(vllm_config: VllmConfig, device: torch.device) -> list[torch.Tensor]:
    """Streams `[0, hc, H]`, pre mix float32 `[0, hc]` and token ids int32 `[0]`."""
    config = vllm_config.model_config.hf_text_config
    streams, hidden = int(config.hc_mult), int(config.hidden_size)
    return [
        torch.empty((0, streams, hidden), dtype=vllm_config.model_config.dtype, device=device),
        torch.empty((0, streams), dtype=torch.float32, device=device),
        torch.empty(0, dtype=torch.int32, device=device),
    ]


def exchanges_through_host(vllm_config: VllmConfig, rows: int) -> bool:
    """Whether the experts of a batch of `rows` (the largest DP rank's) read row counts back to the host.

    vllm-ascend picks the exchange by the number of rows; its all-to-all copies the split sizes to the host, which no
    capture allows.
    """
    from vllm_ascend.ascend_forward_context import MoECommType, select_moe_comm_method

    return select_moe_comm_method(rows, vllm_config) is MoECommType.ALLTOALL


def communication_groups(vllm_config: VllmConfig) -> int:
    """Groups of more than one rank whose collectives are in the pieces."""
    parallel = vllm_config.parallel_config
    return sum(size > 1 for size in (parallel.tensor_parallel_size, parallel.data_parallel_size))


def model_pieces(vllm_config: VllmConfig, tail: ReplayTail) -> int:
    """Pieces that the model's own graphs, and a drafter's, take at most."""
    compilation = vllm_config.compilation_config
    mode: Any = compilation.cudagraph_mode
    if mode is None or vllm_config.model_config.enforce_eager:
        return 0
    last_layer = tail.layers[-1][0]
    # A PIECEWISE graph that breaks out has one break for all layers from the cut on.
    pieces = {CUDAGraphMode.FULL: 1, CUDAGraphMode.PIECEWISE: tail.cut + 2 if tail.breaks_out(1) else last_layer + 2}
    modes = {mode.decode_mode(), mode.mixed_mode()} - {CUDAGraphMode.NONE}
    per_size = sum(pieces[m] for m in modes) + (vllm_config.speculative_config is not None)
    return per_size * len(compilation.cudagraph_capture_sizes or ())
