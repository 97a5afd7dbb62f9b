"""vLLM's CPU worker replaces the buffers that need pinned memory; import it before anything makes one."""

import vllm.v1.worker.cpu.shm  # noqa: F401
