"""Compile the package's Triton kernels for Ascend and run the lowered code on a CPU; no NPU, no CANN.

``python -m tools.check_kernels`` from the repository's root, in the environment of ``requirements/kernels.txt``. What
it proves, and what it cannot, stands in ``docs/kernels.md``.
"""
