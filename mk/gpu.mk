# A GPU machine without vLLM and without a network: what it needs, in one archive (tools/gpu_engine/pack.py).
GPU_BUNDLE := .carry/gpu-engine.tar.xz
GPU_PYTHON ?= python3

.PHONY: gpu-bundle test-gpu

gpu-bundle: $(GPU_BUNDLE)  ## Pack vLLM's Python code for a GPU machine that has PyTorch and Triton only.

$(GPU_BUNDLE): tools/gpu_engine/pack.py tools/gpu_engine/requirements.txt $(wildcard tools/gpu_engine/stubs/*.py) pyproject.toml
	$(PYTHON) tools/gpu_engine/pack.py --output $@

test-gpu:  ## Tests that need an NVIDIA GPU; run on that machine, after `make gpu-bundle` elsewhere.
	tools/gpu_engine/run.sh $(GPU_BUNDLE) $(GPU_PYTHON) -m pytest -q -p no:cacheprovider tests/gpu
