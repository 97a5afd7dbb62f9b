# The Triton kernels: compiled for Ascend and run on this machine's processor; measured on an NVIDIA GPU.

KERNELS := .venv/kernels
KERNELS_PYTHON ?= python3.11
# The interpreter of a machine with a GPU; PyTorch and Triton are all it needs.
BENCH_GPU_PYTHON ?= python3
TEST_TARGETS += check-kernels

$(KERNELS)/.ready: requirements/kernels.txt
	$(KERNELS_PYTHON) -m venv --clear $(KERNELS)
	$(KERNELS)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/kernels.txt
	@touch $@

.PHONY: check-kernels bench-gpu

check-kernels: $(KERNELS)/.ready  ## Compile the kernels for Ascend up to hivmc and run the lowered code on this CPU.
	$(KERNELS)/bin/python -m tools.check_kernels

bench-gpu:  ## Test and measure the kernels on an NVIDIA GPU. BENCH_GPU_ARGS="--json FILE"
	$(BENCH_GPU_PYTHON) -m benchmarks.kernels_gpu $(BENCH_GPU_ARGS)
