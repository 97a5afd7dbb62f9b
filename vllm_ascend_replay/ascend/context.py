"""Forward contexts of the replay batch, nested in the step's, with what vllm-ascend keeps in a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, ForwardContext, get_forward_context
from vllm.platforms import current_platform

from vllm_ascend_replay.batch import KeptRows
from vllm_ascend_replay.layouts import Layout
from vllm_ascend_replay.tail import nested_context


def replay_context(
    kept: KeptRows,
    attn_metadata: dict[str, Any],
    slot_mapping: dict[str, torch.Tensor],
    dp_metadata: Any,
    vllm_config: Any,
    layout: Layout,
) -> Callable[[], AbstractContextManager[ForwardContext]]:
    """Enters the running context with the replay batch's metadata; made before the forward, entered in it.

    `set_additional_forward_context` computes the MoE communication of the smaller batch. It writes the process-wide
    MC2 mask in place (bool `[tokens]`), which the step's later layers and drafter still read: saved and put back.
    """

    @contextmanager
    def enter() -> Iterator[ForwardContext]:
        outer = get_forward_context()
        mask = outer.additional_kwargs.get("mc2_mask")
        saved = None if mask is None else mask.clone()
        descriptor = BatchDescriptor(num_tokens=kept.num_padded)
        extra = current_platform.set_additional_forward_context(
            attn_metadata=attn_metadata,
            vllm_config=vllm_config,
            dp_metadata=dp_metadata,
            num_tokens=kept.num_padded,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            batch_descriptor=descriptor,
        )
        if kept.num_padded > kept.plan.num_rows and extra.get("mc2_mask") is not None:
            # Padding rows are no tokens to the experts. In place: a graph reads the mask where it was captured.
            torch.logical_not(kept.padding_mask(), out=extra["mc2_mask"][: kept.num_padded])
        try:
            with nested_context(
                attn_metadata=attn_metadata,
                slot_mapping=slot_mapping,
                dp_metadata=dp_metadata,
                batch_descriptor=descriptor,
                is_padding=None if outer.is_padding is None else layout.shard(kept.padding_mask(), 1),
                additional_kwargs={**outer.additional_kwargs, **extra},
            ) as inner:
                yield inner
        finally:
            if saved is not None:
                mask.copy_(saved)

    return enter
