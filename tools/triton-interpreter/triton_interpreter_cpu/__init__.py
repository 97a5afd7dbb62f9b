"""A Triton backend named ``cpu`` whose kernels run in Triton's interpreter.

Triton finds it through the ``triton.backends`` entry point, before the first ``@triton.jit``. That is the moment at
which a kernel becomes either compiled or interpreted, so ``TRITON_INTERPRET`` has to be settled here.
"""

import os

# Device nodes of NVIDIA, AMD and Ascend drivers. Looking for them is cheap and imports nothing.
_ACCELERATOR_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/davinci_manager")


def cpu_only() -> bool:
    """Whether this machine shows no accelerator, so that interpreting kernels is what the user wants."""
    return not any(os.path.exists(node) for node in _ACCELERATOR_NODES)


if cpu_only():
    os.environ.setdefault("TRITON_INTERPRET", "1")
