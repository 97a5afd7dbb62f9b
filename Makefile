# Everything is set up under .venv/ in this repository; a second run reuses it.
PYTHON ?= python3.11
CPU := .venv/cpu
# Compiling every module of vLLM and PyTorch takes longer than installing them. Python compiles what it imports, and must
# keep it: engines and servers start in dozens of processes, and compiling takes more than half of each one's imports.
PIP_FLAGS := -q --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE =
export OMP_NUM_THREADS ?= 1
export VLLM_NO_USAGE_STATS = 1
export HF_HUB_OFFLINE = 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-cpu test-core test-engines lint clean

help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

include $(wildcard mk/*.mk)

# The real vLLM engine on a CPU, this package and the interpreting Triton backend.
$(CPU)/.ready: requirements/cpu.txt tools/triton-interpreter/pyproject.toml pyproject.toml
	$(PYTHON) -m venv --clear $(CPU)
	$(CPU)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/cpu.txt
	$(CPU)/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e . -e tools/triton-interpreter
	@touch $@

setup: $(CPU)/.ready  ## Make the CPU environment.

demo: $(CPU)/.ready  ## Run decoder replay through vLLM's real engine on this machine and compare. DEMO_ARGS="--json FILE"
	$(CPU)/bin/vllm-ascend-replay demo $(DEMO_ARGS)

lint: $(CPU)/.ready  ## ruff and mypy.
	$(CPU)/bin/ruff check .
	$(CPU)/bin/ruff format --check .
	$(CPU)/bin/mypy

# Tests that start engines and servers, and those that do not: two processes for two cores.
ENGINE_TESTS := tests/engine tests/cli $(wildcard tests/test_*.py)
OTHER_HOSTS := tests/ascend tests/npu_emulator tests/npu tests/gpu
PYTEST_CPU = $(CPU)/bin/python -m pytest -q -p no:cacheprovider --durations=25 -m "not slow and not gpu and not npu"

test-engines: $(CPU)/.ready  ## Tests that start vLLM's CPU engine, servers and commands.
	$(PYTEST_CPU) $(ENGINE_TESTS)

test-core: $(CPU)/.ready  ## Tests of the core, the kernels, the reference model and its invariants.
	$(PYTEST_CPU) tests $(addprefix --ignore=,$(ENGINE_TESTS) $(OTHER_HOSTS))

test-cpu: $(CPU)/.ready  ## Both.
	$(MAKE) --no-print-directory -j2 --output-sync=target test-core test-engines

test: lint  ## All tests of this machine; does all the set-up.
	$(MAKE) --no-print-directory -j2 --output-sync=target test-core test-engines $(TEST_TARGETS)

test-all: test  ## And the long property profiles.
	REPLAY_HYPOTHESIS_PROFILE=long $(CPU)/bin/python -m pytest -q -p no:cacheprovider -m slow tests $(addprefix --ignore=,$(OTHER_HOSTS))
	$(MAKE) --no-print-directory $(SLOW_TARGETS)

clean:  ## Remove the environments.
	rm -rf .venv build dist *.egg-info
