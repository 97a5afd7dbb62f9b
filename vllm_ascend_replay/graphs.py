"""`ReplayGraphs`: the replay layers as captured graph pieces with eager breaks, one bucket of rows each.

A bucket is captured in two stages, the cut layer and the late layers, because they run in two forward contexts. A
stage is captured in pieces: attention is an eager break that reads the step's own metadata, everything else is in
the pieces. States live in fixed tensors: the gather fills them, each stage reads and overwrites them.

Everything is captured at start-up, after the model's own graphs and in their pool. A batch that no bucket holds runs
eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_ascend_replay.address_guard import AddressGuard
from vllm_ascend_replay.batch import ReplayBatch, States
from vllm_ascend_replay.config import PREFIX, ReplaySettings
from vllm_ascend_replay.ladder import (
    asked_sizes,
    bucket_for,
    check_sizes,
    default_sizes,
    fit_sizes,
    max_buckets,
    prompt_rows,
)
from vllm_ascend_replay.tail import ReplayTail

logger = init_logger("vllm.vllm_ascend_replay")


class GraphError(RuntimeError):
    """A replay graph could not be captured, or a piece of it failed."""


@dataclass(frozen=True)
class GraphHost:
    """What the replay graphs ask of a host."""

    states: Sequence[torch.Tensor]
    """One empty tensor ``[0, ...]`` for each state that crosses the cut (streams, pre mix and, if the layers take
    them, input ids): row shape, dtype and device."""
    wrapper: Callable[[Callable[..., Any], VllmConfig], BreakableCUDAGraphWrapper] = BreakableCUDAGraphWrapper
    """Captures and replays one stage; vLLM's breakable wrapper or a subclass of it."""
    make_dummy_batch: Callable[[int, int, Any], Any] = InputBatch.make_dummy
    """``make_dummy_batch(num_reqs, num_tokens, input_buffers)``: the batch that buckets are captured on."""
    capturing: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around all captures."""
    watched: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    """Tensors by name that the pieces read, that somebody else owns and may move, such as a workspace."""
    row_multiple: int = 1
    """Buckets are multiples of this: the ranks that share the rows evenly."""
    can_capture: Callable[[int], bool] = lambda rows: True
    """Whether a batch of ``rows`` takes a path that a graph can hold. Batches of other sizes run eagerly."""
    streams: int | None = None
    """Pieces that the device can hold; ``None``: any number."""
    comm_groups: int = 0
    """Communication groups that the pieces use; they count against ``streams``."""
    model_pieces: int = 0
    """Pieces of the model's own graphs; they count against ``streams``."""
    pieces_per_layer: int = 1
    """Eager breaks of one layer."""


@dataclass
class Bucket:
    """One captured size, ``N`` rows."""

    rows: int
    states: list[torch.Tensor]
    """Views ``[N, ...]`` of the fixed tensors."""
    aux: list[torch.Tensor]
    """``[N, H]`` for each late aux layer."""
    descriptor: BatchDescriptor
    layers: list[list[tuple[int, int]]] = field(default_factory=lambda: [[], []])
    """Per stage, ``(piece, layer)``: the piece in which a layer begins. Pieces and breaks are counted together."""
    addresses: list[int] = field(default_factory=list)
    """Of the inputs and watched tensors, when the bucket was captured."""
    weights: dict[str, int] = field(default_factory=dict)
    """Addresses of the weights then, until all buckets are captured."""
    pieces: int = 0
    bytes: int = 0
    """Device memory that the capture took."""
    failed: bool = False
    """A tensor moved: the bucket's batches run eagerly, padded as before."""


class ReplayGraphs:
    """The graphs of one model's replay layers."""

    def __init__(
        self,
        tail: ReplayTail,
        sizes: Sequence[int],
        *,
        host: GraphHost,
        vllm_config: VllmConfig,
        device: torch.device,
        debug: bool = False,
    ) -> None:
        """
        Args:
            tail: whose layers to capture.
            sizes: rows of the buckets, ascending.
            host: see `GraphHost`.
            vllm_config: vLLM's configuration.
            device: of the layers.
            debug: replay piece by piece, with a synchronisation after each.
        """
        self.tail, self.sizes, self.host, self.device, self.debug = tail, list(sizes), host, device, debug
        self.vllm_config = vllm_config
        self.buckets: dict[int, Bucket] = {}
        self.captures = 0
        """Times that `capture` ran: vLLM captures once more to measure memory."""
        largest = self.sizes[-1]
        # Allocated here, so that memory profiling counts them.
        self._states = [state.new_zeros((largest, *state.shape[1:])) for state in host.states]
        self._aux: list[torch.Tensor] = []
        compilation = copy(vllm_config.compilation_config)
        compilation.cudagraph_capture_sizes = self.sizes
        compilation.max_cudagraph_capture_size = largest
        config = copy(vllm_config)
        config.compilation_config = compilation
        self._manager = CudaGraphManager(config, device, CUDAGraphMode.PIECEWISE, 1)
        self._stages = [host.wrapper(self._stage(index), config) for index in range(2)]
        self._bucket: Bucket | None = None  # the one being captured
        self._at: tuple[int, int] = (0, 0)  # its newest (piece, layer)
        self._guard: AddressGuard | None = None

    # -- capture ------------------------------------------------------------------------------------------------

    def capture(self, prepare: Callable[[int], ReplayBatch]) -> None:
        """Capture every bucket, the largest first.

        Args:
            prepare: ``prepare(rows)`` makes a batch of that many rows on the buffers and through the code of a real
                step; called before the warm-up and before the capture of each bucket.

        Raises:
            GraphError: a capture failed; names the bucket, the piece and the layer.
        """
        began, free = time.perf_counter(), free_bytes()
        self.buckets.clear()
        for stage in self._stages:
            stage.clear_graphs()
        streams = self._states[0]
        if len(self._aux) != len(self.tail.aux_layers):
            self._aux = [streams.new_zeros((len(streams), streams.shape[-1])) for _ in self.tail.aux_layers]
        modules = {f"layers.{index}": layer for index, layer in self.tail.layers}
        self._guard = guard = AddressGuard(self.host.watched, modules)
        before = [free]

        def create_forward(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            batch = prepare(desc.num_tokens)
            if warmup:
                before.append(free_bytes())
            bucket = self._new_bucket(desc.num_tokens)

            def forward(mode: CUDAGraphMode) -> None:
                self._capture_bucket(bucket, batch, mode)
                if mode == CUDAGraphMode.PIECEWISE:
                    assert batch.kept is not None
                    bucket.addresses, bucket.weights = guard.snapshot(batch.kept), guard.weight_addresses()
                    bucket.pieces = sum(stage.entries[bucket.descriptor].capture.num_graphs for stage in self._stages)
                    bucket.bytes = max(before[-1] - free_bytes(), 0)
                    self.buckets[bucket.rows] = bucket

            return forward

        if self.tail.has_early_aux and self.tail.break_out_from is not None:
            # A model graph holds these states across its break. In its own pool the buckets would overwrite them.
            pool = current_platform.graph_pool_handle()
            for stage in self._stages:
                stage.graph_pool = pool
        with self.host.capturing():
            self._manager.capture(create_forward, "Capturing decoder replay graphs")
        self._settle(guard)
        self.captures += 1
        pieces = sum(bucket.pieces for bucket in self.buckets.values())
        logger.info(
            "captured decoder replay graphs of %s rows: %d pieces, %.1f s, %.1f MiB, and %.1f MiB of fixed tensors",
            ", ".join(map(str, self.sizes)),
            pieces,
            time.perf_counter() - began,
            max(free - free_bytes(), 0) / 2**20,
            self.fixed_bytes / 2**20,
        )

    def _settle(self, guard: AddressGuard) -> None:
        """Watch the weights from now on; a bucket that was captured before one of them moved is off."""
        guard.settle()
        now = guard.weight_addresses()
        for bucket in self.buckets.values():
            moved = next((name for name, address in bucket.weights.items() if now.get(name) != address), None)
            bucket.weights = {}
            if moved is not None:
                self._turn_off(bucket, moved)

    @property
    def fixed_bytes(self) -> int:
        """Device memory of the tensors that all buckets share, outside the graphs' pool."""
        return sum(t.nbytes for t in (*self._states, *self._aux))

    def _new_bucket(self, rows: int) -> Bucket:
        return Bucket(
            rows=rows,
            states=[state[:rows] for state in self._states],
            aux=[aux[:rows] for aux in self._aux],
            descriptor=BatchDescriptor(num_tokens=rows),
        )

    def _capture_bucket(self, bucket: Bucket, batch: ReplayBatch, mode: CUDAGraphMode) -> None:
        ranks = self.vllm_config.parallel_config.data_parallel_size
        across = None if ranks == 1 else torch.full((ranks,), bucket.rows, dtype=torch.int32)
        self._bucket, self._at = bucket, (0, self.tail.cut)
        try:
            with set_forward_context(
                None,
                self.vllm_config,
                num_tokens=bucket.rows,
                num_tokens_across_dp=across,
            ):
                # The layers before the cut did not run here, so nobody counted theirs.
                get_forward_context().moe_layer_index = self.tail.moe_layers_before
                self._run_stages(bucket, batch, mode)
        except Exception as error:
            what = "capturing" if mode == CUDAGraphMode.PIECEWISE else "warming up"
            piece, layer = self._at
            raise GraphError(
                f"{what} the decoder replay graph of {bucket.rows} rows failed in piece {piece}, at layer {layer}: "
                f"{type(error).__name__}: {error}. {PREFIX}_GRAPHS=0 runs the replay layers eagerly, "
                f"{PREFIX}_GRAPH_SIZES asks for other sizes than {','.join(map(str, self.sizes))}"
            ) from error
        finally:
            self._bucket = None

    def _stage(self, index: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        """What a stage captures: its layers, and writing their results over the states."""

        def run(positions: torch.Tensor, streams: torch.Tensor, pre_mix: torch.Tensor, *ids: torch.Tensor) -> Any:
            bucket = self._bucket
            assert bucket is not None
            if get_forward_context().attn_metadata is None:
                # The attention breaks would be recorded as what they do while profiling: fill with zeros.
                raise GraphError("the batch to capture has no attention metadata")

            def before_layer(layer: int) -> None:
                capture = BreakableCUDAGraphCapture.current()
                self._at = (0 if capture is None else len(capture.segments)), layer
                if capture is not None:
                    bucket.layers[index].append(self._at)

            late = bool(index)
            new_streams, new_pre, aux = self.tail.run_layers(
                self.tail.stages[index],
                positions,
                streams,
                pre_mix,
                ids[0] if ids else None,
                before_layer=before_layer,
            )
            # A later capture may reuse what a stage allocated, so nothing is left there.
            streams.copy_(new_streams)
            pre_mix.copy_(new_pre)
            in_cut_layer = sum(layer in self.tail.aux_layers for layer, _ in self.tail.stages[0])
            for buffer, value in zip(bucket.aux[in_cut_layer:] if late else bucket.aux[:in_cut_layer], aux):
                buffer.copy_(value)
            return streams, pre_mix

        return run

    # -- a step -------------------------------------------------------------------------------------------------

    def size_for(self, rows: int) -> int | None:
        """Rows of the bucket that a batch of ``rows`` (of the largest rank) is padded to; ``None``: it runs as it is.

        The same on every rank, whether or not a rank's bucket failed.
        """
        return bucket_for(rows, self.sizes) if self._captured(self.sizes[-1]) else None

    def runs(self, size: int) -> bool:
        """Whether the bucket of ``size`` rows runs as a graph on this rank."""
        return self._captured(size) and not self.buckets[size].failed

    def __call__(self, batch: ReplayBatch, states: Sequence[torch.Tensor]) -> States | None:
        """Run ``batch`` out of the graph of its size, or return ``None`` if it must run eagerly.

        Args:
            batch: its ``kept.num_padded`` is a bucket's size.
            states: tensors ``[T, ...]`` that cross the cut.

        Returns:
            Views of fixed tensors, valid until the next replay.
        """
        kept = batch.kept
        assert kept is not None
        bucket = self.buckets.get(kept.num_padded)
        if bucket is None or bucket.failed or not self._captured(bucket.rows):
            return None
        if len(states) != len(bucket.states) or len(self.tail.aux_layers) != len(bucket.aux):
            return None
        assert self._guard is not None
        try:
            moved = self._guard.moved(kept, bucket.addresses)
        except Exception as error:  # a tensor that somebody else owns is gone; a forward goes on
            moved = f"something that could not be looked at ({type(error).__name__}: {error})"
        if moved is not None:
            self._turn_off(bucket, moved)
            return None
        kept.gather(states, out=bucket.states)
        self._run_stages(bucket, batch, CUDAGraphMode.PIECEWISE)
        return bucket.states[0], bucket.states[1], bucket.aux

    @staticmethod
    def _turn_off(bucket: Bucket, moved: str) -> None:
        bucket.failed = True
        logger.error(
            "the decoder replay graph of %d rows is off from now on and its batches run eagerly: %s is no longer "
            "where the graph reads it. Something was allocated anew after start-up",
            bucket.rows,
            moved,
        )

    def _captured(self, size: int) -> bool:
        """Whether the graph is there. vLLM may drop all graphs: those of memory profiling, or when experts move."""
        bucket = self.buckets.get(size)
        return bucket is not None and all(bucket.descriptor in stage.entries for stage in self._stages)

    def _run_stages(self, bucket: Bucket, batch: ReplayBatch, mode: CUDAGraphMode) -> None:
        assert batch.kept is not None
        assert batch.cut_context is not None
        assert batch.late_context is not None
        positions, is_padding = batch.kept.positions, batch.kept.padding_mask()
        by_piece = self.debug and bucket.rows in self.buckets
        for index, context in enumerate((batch.cut_context, batch.late_context)):
            with context():
                # The nested context is the batch's own; by these fields the wrapper finds its graph.
                inner = get_forward_context()
                inner.cudagraph_runtime_mode = mode
                inner.batch_descriptor = bucket.descriptor
                inner.is_padding = is_padding
                if by_piece:
                    self._replay_by_piece(bucket, index)
                else:
                    self._stages[index](positions, *bucket.states)

    def _replay_by_piece(self, bucket: Bucket, stage: int) -> None:
        """Replay with a synchronisation after each piece and break.

        Raises:
            GraphError: one failed; names it and its layers.
        """
        segments = self._stages[stage].entries[bucket.descriptor].capture.segments
        for number, segment in enumerate(segments):
            try:
                segment()
                torch.accelerator.synchronize()
            except Exception as error:
                kind = "break" if number % 2 else "piece"
                raise GraphError(
                    f"{kind} {number} of {len(segments)} of the decoder replay graph of {bucket.rows} rows failed, "
                    f"{_layers_of(bucket.layers[stage], number)}: {type(error).__name__}: {error}"
                ) from error


def _layers_of(begins: Sequence[tuple[int, int]], piece: int) -> str:
    """Which layers a piece (or break) holds, given the pieces in which layers begin."""
    inside = [layer for begin, layer in begins if begin == piece]
    before = [layer for begin, layer in begins if begin < piece]
    layers = before[-1:] + inside
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"


def free_bytes() -> int:
    """Free device memory; 0 on a device that does not say."""
    try:
        torch.accelerator.synchronize()
        return int(torch.accelerator.get_memory_info()[0])
    except (AttributeError, NotImplementedError, RuntimeError):
        return 0


def choose_sizes(
    settings: ReplaySettings,
    vllm_config: VllmConfig,
    host: GraphHost,
    *,
    window: int,
    keep_last: int,
    num_layers: int,
    align: int = 1,
) -> list[int]:
    """Rows of the buckets to capture: what the user asked for or the ladder, cut to the device's stream budget.

    Args:
        num_layers: replay layers, for the number of pieces.
        align: first kept rows are rounded down to a multiple of this.

    Raises:
        SettingError: sizes that were asked for are not allowed.
    """
    scheduler = vllm_config.scheduler_config
    limit = scheduler.max_num_batched_tokens
    name, asked = asked_sizes(vllm_config.compilation_config, settings.graph_sizes)
    if asked:
        sizes = check_sizes(name, asked, max_num_tokens=limit, multiple=host.row_multiple)
    else:
        sizes = default_sizes(
            window=window,
            keep_last=keep_last,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_tokens=limit,
            align=align,
            multiple=host.row_multiple,
        )
    if eager := [size for size in sizes if not host.can_capture(size)]:
        logger.info("replay batches of %s rows run eagerly: no graph can hold them", ", ".join(map(str, eager)))
        sizes = [size for size in sizes if size not in eager]
    pieces = num_layers * host.pieces_per_layer + 2
    allowed = max_buckets(streams=host.streams, pieces=pieces, comm_groups=host.comm_groups, used=host.model_pieces)
    fitted = fit_sizes(sizes, allowed, needed=prompt_rows(keep_last, align))
    if len(fitted) < len(sizes):
        logger.warning(
            "the device's streams hold %d decoder replay graphs of %d pieces; asked for %s rows, capturing %s",
            allowed,
            pieces,
            ", ".join(map(str, sizes)),
            ", ".join(map(str, fitted)) or "none",
        )
    return fitted
