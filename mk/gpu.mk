# A GPU machine without vLLM and without a network: what it needs, in one archive (tools/gpu_engine/pack.py).
GPU_BUNDLE := .carry/gpu-engine.tar.xz
GPU_PYTHON ?= python3
# What bench-gpu measures: benchmarks/NAME_gpu.py each. The kernels need PyTorch and Triton only, the others the bundle.
BENCH_GPU_PARTS ?= kernels peer step engine
BENCH_GPU_OUT ?= build/bench-gpu

.PHONY: gpu-bundle test-gpu bench-gpu bench-gpu-kernels

gpu-bundle: $(GPU_BUNDLE)  ## Pack vLLM's Python code for a GPU machine that has PyTorch and Triton only.

$(GPU_BUNDLE): tools/gpu_engine/pack.py tools/gpu_engine/requirements.txt $(wildcard tools/gpu_engine/stubs/*.py) pyproject.toml
	$(PYTHON) tools/gpu_engine/pack.py --output $@

test-gpu:  ## Tests that need an NVIDIA GPU; run on that machine, after `make gpu-bundle` elsewhere.
	tools/gpu_engine/run.sh $(GPU_BUNDLE) $(GPU_PYTHON) -m pytest -q -p no:cacheprovider tests/gpu

# One part after the other, since they share the GPU.
bench-gpu:  ## Measure on an NVIDIA GPU, after `make gpu-bundle` elsewhere. BENCH_GPU_PARTS="peer engine"
	@command -v nvidia-smi > /dev/null || { echo "bench-gpu: skipped, this machine has no NVIDIA GPU"; exit 0; }; \
	mkdir -p $(BENCH_GPU_OUT); \
	for part in $(BENCH_GPU_PARTS); do $(MAKE) --no-print-directory bench-gpu-$$part || exit; done

bench-gpu-kernels:
	$(GPU_PYTHON) -m benchmarks.kernels_gpu --json $(BENCH_GPU_OUT)/kernels.json $(BENCH_GPU_ARGS)

bench-gpu-%:
	tools/gpu_engine/run.sh $(GPU_BUNDLE) $(GPU_PYTHON) -m benchmarks.$*_gpu --json $(BENCH_GPU_OUT)/$*.json $(BENCH_GPU_ARGS)
