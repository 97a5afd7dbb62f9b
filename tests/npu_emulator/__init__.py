"""The released vllm-ascend on a CPU: its operators in plain PyTorch, everything else its own code.

Test support, not part of the package. One process emulates one hardware profile, `NPU_EMU_DEVICE` = A2 (default), A3
or A5, chosen before the first import.

| module | holds |
|---|---|
| `stub` | `torch_npu` and its relatives as importable packages, `torch.npu`, "npu" tensors on the CPU |
| `triton_cpu` | Triton kernels in Triton's interpreter |
| `graphs` | `torch.npu.NPUGraph`: records what is launched, replays it, shares a pool's memory |
| `numerics` | linear, norm, rotary, hyper-connection and MoE arithmetic |
| `caches` | paged writes and reads, the ratio-2 compressor ring |
| `sparse_a2` | A2/A3: INT8 indexer, sparse attention, their task-split metadata |
| `sparse_a5` | A5: packed cache formats, MXFP4 indexers, mixed-quant sparse attention |
| `operators` | the schemas under which vllm-ascend calls the above |
| `patches` | NPU-bound Python functions of vllm-ascend replaced one by one |
| `tiny` | a tiny DeepSeek-V4.1 and the engine configuration around it |
| `rank` | the real model runner and scheduler, stepped by hand |
| `session` | drives a `Rank`, poisons every page handed out, remembers every row by position |
| `oracle` | dense DeepSeek-V4.1 over one whole sequence: no pages, no batches, no chunks |
| `checks` | compares what a session remembered with the oracle |

Three rules make a test on it worth something:

* **Batch independence.** Every operator computes in float64 and rounds once to its output dtype, so a row's result
  does not depend on the rows beside it, and equal results can be demanded bit by bit.
* **Strictness.** Two rows writing one slot, a slot or block-table entry out of range, and task-split metadata built
  from other lengths than those in use all raise.
* **Poison.** Pages are filled with NaN (or -1, 0xFF) whenever they are handed out: what is read without being written
  shows.

`activate()` makes the process an emulated Ascend machine. Call it before importing vllm or vllm_ascend.
"""

import atexit
import gc
import os

DEVICE = os.environ.get("NPU_EMU_DEVICE", "A2")
ON_A5 = DEVICE == "A5"


def activate() -> None:
    """Installs the stub and every patch; idempotent.

    Raises:
        ValueError: `NPU_EMU_DEVICE` names no known profile.
    """
    if DEVICE not in ("A2", "A3", "A5"):
        raise ValueError(f"NPU_EMU_DEVICE={DEVICE!r}: allowed are A2, A3 and A5")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from . import stub  # noqa: F401
    from .patches import install

    install()


def freeze_imports() -> None:
    """Spares the collector what was imported for good: a session collects four times, 0.4 s each to look through it."""
    gc.collect()
    gc.freeze()
    # Else libraries complain at exit about what they take for leaks.
    atexit.register(gc.unfreeze)
