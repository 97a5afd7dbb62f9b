# Everything is set up under .venv/ in this repository; a second run reuses it.
PYTHON ?= python3.11
CPU := .venv/cpu
export OMP_NUM_THREADS ?= 1
export VLLM_NO_USAGE_STATS = 1
export HF_HUB_OFFLINE = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-cpu lint clean

help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

include $(wildcard mk/*.mk)

# The real vLLM engine on a CPU, this package and the interpreting Triton backend.
$(CPU)/.ready: requirements/cpu.txt tools/triton-interpreter/pyproject.toml pyproject.toml
	$(PYTHON) -m venv --clear $(CPU)
	$(CPU)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/cpu.txt
	$(CPU)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . -e tools/triton-interpreter
	@touch $@

setup: $(CPU)/.ready  ## Make the CPU environment.

demo: $(CPU)/.ready  ## Run decoder replay through vLLM's real engine on this machine and compare. DEMO_ARGS="--json FILE"
	$(CPU)/bin/vllm-ascend-replay demo $(DEMO_ARGS)

lint: $(CPU)/.ready  ## ruff and mypy.
	$(CPU)/bin/ruff check .
	$(CPU)/bin/ruff format --check .
	$(CPU)/bin/mypy

test-cpu: $(CPU)/.ready  ## Tests on vLLM's CPU engine.
	$(CPU)/bin/python -m pytest -q -m "not slow and not gpu and not npu" --ignore=tests/ascend --ignore=tests/npu_emulator

test: lint test-cpu $(TEST_TARGETS)  ## All tests of this machine; does all the set-up.

test-all: test  ## And the long property profiles.
	REPLAY_HYPOTHESIS_PROFILE=long $(CPU)/bin/python -m pytest -q -m "slow" --ignore=tests/ascend --ignore=tests/npu_emulator

clean:  ## Remove the environments.
	rm -rf .venv build dist *.egg-info
