"""vLLM's own decoder replay pieces and this package's, side by side in one process on one GPU.

``python -m benchmarks.peer_gpu [--json FILE] [--require-targets] [--tiny]`` from the repository's root, where vLLM's
Python code is found (``tools/gpu_engine/run.sh``). What is measured, for steps of `Shape` with DeepSeek-V4.1's widths:

* *batch*: with the rows to keep decided, the replay batch without attention metadata: the upload, the gather of
  rows, positions and slots, the smaller ``InputBatch``;
* *prepare*: all that happens in a step before its forward, except building attention metadata: the plan, *batch*, the
  forward context;
* *gather*: the states that cross the cut, of the kept rows: seven tensors in vLLM, three here;
* *head*: hyper-connection collapse and final norm, with the same kernels for both: vLLM runs them on every row of the
  step, since it scatters the streams before them, this package on the kept rows, and scatters their result;
* *scatter*: streams and pre mix in vLLM, the final hidden states here;
* *seam*: gather, head and scatter in one call, with a tail that runs no layer between them.

Both sides run through their own classes: vLLM's ``DeepseekV41ModelState`` and ``DecoderReplayLayers``, this package's
``ReplayModelState`` and ``ReplayTail``. Device times are between CUDA events with the L2 cache flushed before and the
device kept busy until all is queued; host times are those of the same calls. The two sides take turns; medians. Extra
memory is the peak over what was allocated before the call, its results included.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_ascend_replay.reference.engine import prepare_environment

if __name__ == "__main__":
    # Settled when vLLM is imported.
    os.environ.update(prepare_environment({}))
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"

import numpy as np
import torch
import triton
import vllm
from torch.nn import functional
from vllm import EngineArgs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.model_executor.kernels.mhc.triton import hc_collapse_triton
from vllm.models.deepseek_v41.decoder_replay_layers import DecoderReplayLayers
from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from benchmarks.kernels_gpu import count_launches
from benchmarks.report import about, say_missed, write
from vllm_ascend_replay import reference
from vllm_ascend_replay.batch import KeptRows, ReplayBatch, shrink_input_batch
from vllm_ascend_replay.config import ReplaySettings
from vllm_ascend_replay.model_state import ReplayModelState, StepInputs
from vllm_ascend_replay.reference.config import write_model
from vllm_ascend_replay.tail import ReplayTail, replay_context

if current_platform.is_cpu():
    # Replaces the buffers that need pinned memory, as vLLM's CPU worker does.
    import vllm.v1.worker.cpu.shm

WINDOW = 128
GROUPS = 5
EPS = 1e-6

# What must hold on an H200, at the largest step with 128 and 1024 kept rows.
MIN_SEAM_SPEEDUP = 5.0
MIN_MEMORY_RATIO = 4.0
MAX_HOST_SHARE = 0.5


@dataclass(frozen=True)
class Shape:
    """A step of ``requests`` equal prompts that begin in it and keep their last ``window`` rows."""

    tokens: int
    requests: int
    hidden: int = 5120
    streams: int = 4
    window: int = WINDOW

    @property
    def kept(self) -> int:
        return self.requests * self.window


SHAPES = (Shape(4096, 1), Shape(16384, 1), Shape(16384, 8))
TINY = (Shape(64, 1, hidden=16, window=8), Shape(96, 4, hidden=16, window=8))


class NoMetadata(DefaultModelState):
    """vLLM's default model state, less the attention metadata."""

    def prepare_attn(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"swa": None}


class VllmState(DeepseekV41ModelState, NoMetadata):
    """vLLM's replay; what it builds metadata with is `NoMetadata`'s."""


class OurState(ReplayModelState, NoMetadata):
    """This package's replay on a host without attention."""

    window_align = 1

    def is_dummy_batch(self, input_batch: Any) -> bool:
        return not input_batch.has_prefill

    def build_replay_batch(self, step: StepInputs, kept: KeptRows, dp_metadata: Any) -> ReplayBatch:
        assert self.replay_buffers is not None
        batch = step.input_batch
        seq_lens, tables = self.replay_buffers.select_requests(kept, batch.seq_lens, step.block_tables, batch.num_reqs)
        batch = shrink_input_batch(batch, kept, seq_lens)
        metadata = self.prepare_attn(batch, CUDAGraphMode.NONE, tables, kept.slot_mappings, [], step.kv_cache_config)
        slots = self.replay_buffers.slots_by_layer(kept, step.kv_cache_config)
        context = replay_context(kept, metadata, slots, dp_metadata)
        return ReplayBatch(kept, cut_context=context, late_context=context)


class Layer(torch.nn.Module):
    """Stands for the cut layer: writes nothing."""

    def write_kv(self, *states: torch.Tensor) -> None:
        pass


class Step:
    """One step's inputs, and both sides' objects around them."""

    def __init__(self, config: VllmConfig, shape: Shape, device: torch.device) -> None:
        self.shape, self.device, self.config = shape, device, config
        generator = torch.Generator(device).manual_seed(shape.tokens + shape.requests)

        def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device, dtype=dtype)

        tokens, hidden, streams, requests = shape.tokens, shape.hidden, shape.streams, shape.requests
        self.batch = self._batch(device)
        self.slots = torch.randint(0, 1 << 20, (GROUPS, tokens), generator=generator, device=device)
        self.tables = tuple(torch.zeros((requests, 64), dtype=torch.int32, device=device) for _ in range(GROUPS))
        group = SimpleNamespace(
            kv_cache_spec=SimpleNamespace(prefix_replay_tokens=shape.window, prefix_cacheable=True),
            layer_names=[f"layer{i}" for i in range(8)],
        )
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group] * GROUPS)
        bf16 = torch.bfloat16
        self.streams, self.pre_mix = random(tokens, streams, hidden, dtype=bf16), random(tokens, streams)
        self.mlp_out = random(tokens, hidden, dtype=bf16)
        self.post_mix, self.res_mix = random(tokens, streams, 1), random(tokens, streams, streams)
        self.norm = random(hidden, dtype=bf16)
        # What the layers return for the kept rows.
        self.late_streams, self.late_pre = random(shape.kept, streams, hidden, dtype=bf16), random(shape.kept, streams)

        layers = DecoderReplayLayers(shape.window, self._vllm_layers, lambda *states: None, {"swa"}, "swa")
        model = SimpleNamespace(token_lookback_depth=0, decoder_replay_layers=layers)
        self.vllm_layers = layers
        self.vllm_state = VllmState(config, model, None, device)
        self.tail = ReplayTail([Layer(), Layer()], cut=0, run_layer=self._our_layer)
        self.our_state = OurState(config, model, None, device)
        self.our_state.init_replay(self.our_state, self.tail, ReplaySettings(log_every=0), window=shape.window)
        self._prepare(self.vllm_state.prepare_attn)
        self._prepare(self.our_state._prepare_replay)
        self.context = create_forward_context({}, config, cudagraph_runtime_mode=CUDAGraphMode.NONE)

    def _batch(self, device: torch.device) -> InputBatch:
        requests, length = self.shape.requests, self.shape.tokens // self.shape.requests
        buffers = InputBuffers(requests, self.shape.tokens, device)
        batch = InputBatch.make_dummy(requests, self.shape.tokens, buffers, is_padding=False)
        batch.positions.copy_(torch.arange(length, device=device).repeat(requests))
        # Each prompt ends in this step.
        batch.prefill_len_np[:] = length
        batch.is_prefilling_np[:] = True
        batch.has_prefill, batch.decode_graph_eligible = True, False
        return batch

    # -- prepare ------------------------------------------------------------------------------------------------

    def _prepare(self, prepare: Callable[..., Any]) -> None:
        groups: list[list[Any]] = [[] for _ in range(GROUPS)]
        prepare(self.batch, CUDAGraphMode.NONE, self.tables, self.slots, groups, self.kv_cache_config)

    def prepare_vllm(self) -> None:
        self.vllm_state._prepare_replay_batch(
            self.batch,
            CUDAGraphMode.NONE,
            self.tables,
            self.slots,
            [],
            self.kv_cache_config,
            self.vllm_state._replay_start[: self.shape.requests],
        )

    def prepare_ours(self) -> None:
        self._prepare(self.our_state._prepare_replay)

    # -- the seam -----------------------------------------------------------------------------------------------

    def _vllm_layers(self, *states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.late_streams, self.late_pre

    def _our_layer(self, layer: Any, *states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.late_streams, self.late_pre

    @property
    def vllm_states(self) -> tuple[torch.Tensor, ...]:
        batch = self.batch
        mixes = self.pre_mix, self.post_mix, self.res_mix
        return self.mlp_out, batch.positions, batch.input_ids, *mixes, self.streams

    def head(self, streams: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hc_collapse_triton(streams, pre_mix), self.norm.shape, self.norm, EPS)

    def seam_vllm(self) -> torch.Tensor:
        with override_forward_context(self.context):
            return self.head(*self.vllm_layers._run(*self.vllm_states))

    def seam_ours(self) -> torch.Tensor:
        self.tail.batch = self.our_batch
        with override_forward_context(self.context):
            compact = self.tail(self.batch.positions, self.streams, self.pre_mix, self.batch.input_ids)
            return self.tail.finish(self.head(*compact), [], self.shape.tokens)[0]

    def pieces(self) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
        """What is measured: vLLM's call and ours."""
        self.prepare_vllm()
        self.prepare_ours()
        self.our_batch = self.tail.batch
        assert self.our_batch is not None
        kept = self.our_batch.kept
        assert kept is not None
        rows = self.vllm_layers.replay_batch.rows
        assert torch.equal(rows, kept.rows)
        crossing = [self.streams, self.pre_mix, self.batch.input_ids]
        hidden = self.head(self.late_streams, self.late_pre)
        wide = [(self.late_streams, self.streams), (self.late_pre, self.pre_mix)]
        kept_lens = np.full(self.shape.requests, self.shape.window, dtype=np.int64)
        replay_start = np.zeros(self.shape.requests, dtype=np.int32)

        def batch_vllm() -> Any:
            start = self.vllm_state._replay_start
            return self.vllm_state._kept_input_batch(self.batch, self.slots, start, kept_lens, self.shape.kept)

        def batch_ours() -> Any:
            buffers, batch = self.our_state.replay_buffers, self.batch
            kept_rows = buffers.fill(
                kept.plan,
                query_start_loc=batch.query_start_loc,
                positions=batch.positions,
                slot_mappings=self.slots,
                replay_start=replay_start,
                num_padded=self.shape.kept,
                host_boundaries=batch.query_start_loc_np,
            )
            seq_lens, _ = buffers.select_requests(kept_rows, batch.seq_lens, self.tables, batch.num_reqs)
            return shrink_input_batch(batch, kept_rows, seq_lens)

        return {
            "batch": (batch_vllm, batch_ours),
            "prepare": (self.prepare_vllm, self.prepare_ours),
            "gather": (
                lambda: [state.index_select(0, rows) for state in self.vllm_states],
                lambda: kept.gather(crossing),
            ),
            "head": (
                lambda: self.head(self.streams, self.pre_mix),
                lambda: self.head(self.late_streams, self.late_pre),
            ),
            "scatter": (
                lambda: [like.new_zeros(like.shape).index_copy_(0, rows, out) for out, like in wide],
                lambda: kept.scatter([hidden], self.shape.tokens),
            ),
            "seam": (self.seam_vllm, self.seam_ours),
        }

    def check(self) -> None:
        """Both seams give the same rows, and zeros elsewhere."""
        theirs, ours = self.seam_vllm(), self.seam_ours()
        assert self.our_batch is not None
        rows = self.our_batch.kept.rows
        assert torch.equal(theirs[rows], ours[rows])
        assert int(ours.any(1).sum()) == len(rows)


class Clock:
    """Times and extra memory of calls."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.on_gpu, self.repeats = device.type == "cuda", repeats
        self.flush = torch.empty(256 << 20, dtype=torch.int8, device=device) if self.on_gpu else None

    def measure(self, calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
        """Medians of device and host microseconds, MiB and launches of each call.

        The calls take turns, so that whatever else the machine does meets them alike.
        """
        for call in calls.values():
            for _ in range(8 if self.on_gpu else 1):
                call()
        # What lives does not die here, and Python's collector would look through all of it in the midst of a call.
        gc.collect()
        gc.freeze()
        gc.disable()
        device: dict[str, list[float]] = {name: [] for name in calls}
        host: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.repeats):
            for name, call in calls.items():
                seconds, microseconds = self._once(call)
                host[name].append(seconds * 1e6)
                device[name].append(microseconds)
        gc.enable()
        times = {name: {"host_us": statistics.median(host[name])} for name in calls}
        if self.on_gpu:
            for name, call in calls.items():
                times[name] |= {"device_us": statistics.median(device[name]), **self._memory(call)}
        return times

    def _once(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of the host and microseconds of the device."""
        if self.flush is None:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin, 0.0
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        # The device is kept busy until all is queued, so that the events do not see the host.
        torch.cuda._sleep(2_000_000)
        start.record()
        begin = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - begin
        end.record()
        torch.cuda.synchronize()
        del result
        return seconds, start.elapsed_time(end) * 1e3

    def _memory(self, call: Callable[[], Any]) -> dict[str, float]:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - base
        del result
        return {"extra_mib": peak / 2**20, "launches": count_launches(call)}


@torch.inference_mode()
def measure(config: VllmConfig, shape: Shape, clock: Clock, device: torch.device) -> dict[str, Any]:
    """One shape's figures: ``{piece: {"vllm": {...}, "ours": {...}}}``."""
    step = Step(config, shape, device)
    pieces = step.pieces()
    step.check()
    row: dict[str, Any] = {
        "tokens": shape.tokens,
        "requests": shape.requests,
        "kept": shape.kept,
        "hidden": shape.hidden,
    }
    for name, calls in pieces.items():
        row[name] = clock.measure(dict(zip(("vllm", "ours"), calls)))
    step.check()
    return row


def missed_targets(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What must hold on an H200 and does not."""
    missed = []
    for row in rows:
        where = f"T={row['tokens']} R={row['requests']} K={row['kept']}"
        seam = row["seam"]
        share = row["batch"]["ours"]["host_us"] / row["batch"]["vllm"]["host_us"]
        if share > MAX_HOST_SHARE:
            missed.append(f"{where}: the batch takes {share:.2f} of vLLM's host time, {MAX_HOST_SHARE} wanted")
        if row["tokens"] < 16384 or "device_us" not in seam["ours"]:
            continue
        for key, name, wanted in (
            ("device_us", "device time", MIN_SEAM_SPEEDUP),
            ("extra_mib", "extra memory", MIN_MEMORY_RATIO),
        ):
            ratio = seam["vllm"][key] / seam["ours"][key]
            if ratio < wanted:
                missed.append(f"{where}: {ratio:.1f}x less {name} in the seam, {wanted}x wanted")
    return missed


def make_config(directory: Path, shapes: Sequence[Shape]) -> VllmConfig:
    """vLLM's configuration; of the model only its existence matters."""
    reference.register()
    tokens = max(shape.tokens for shape in shapes)
    return EngineArgs(
        model=str(write_model(directory, dtype="bfloat16", max_position_embeddings=tokens)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=tokens,
        max_num_seqs=64,
        max_num_batched_tokens=tokens,
    ).create_engine_config()


def print_row(row: dict[str, Any]) -> None:
    print(f"\nT={row['tokens']} R={row['requests']} K={row['kept']}")
    print(f"{'':>10} {'device us':>21} {'host us':>21} {'extra MiB':>21} {'launches':>13}")
    for name in ("batch", "prepare", "gather", "head", "scatter", "seam"):
        cells = []
        for key, width in (("device_us", 21), ("host_us", 21), ("extra_mib", 21), ("launches", 13)):
            theirs, ours = (row[name][side].get(key, 0.0) for side in ("vllm", "ours"))
            digits = 0 if key == "launches" else 1
            cells.append(f"{theirs:.{digits}f} > {ours:.{digits}f}".rjust(width))
        print(f"{name:>10} {' '.join(cells)}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="tiny tensors, on any machine: nothing worth reporting")
    parser.add_argument("--require-targets", action="store_true", help="exit 1 if a target of an H200 is missed")
    arguments = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not arguments.tiny:
        print("bench-gpu: skipped, this machine has no NVIDIA GPU")
        return 0
    device = torch.device("cuda" if on_gpu else "cpu")
    shapes = TINY if arguments.tiny else SHAPES
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    print(f"{name}, PyTorch {torch.__version__}, Triton {triton.__version__}, vLLM {vllm.__version__}; vLLM's > ours")
    clock, rows = Clock(device, arguments.repeats), []
    with tempfile.TemporaryDirectory() as directory:
        config = make_config(Path(directory), shapes)
        for shape in shapes:
            rows.append(measure(config, shape, clock, device))
            print_row(rows[-1])
            if on_gpu:
                torch.cuda.empty_cache()
    missed = missed_targets(rows)
    say_missed(missed)
    write(arguments.json, {**about("peer_gpu", parser, arguments), "rows": rows, "missed": missed})
    return 1 if missed and arguments.require_targets else 0


if __name__ == "__main__":
    sys.exit(main())
