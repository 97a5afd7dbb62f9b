# The Ascend host on a CPU: the released vllm-ascend over emulated operators (docs/ascend.md).
# Every target sets up .venv/ascend by itself; nothing outside the repository is written.

ASCEND_PYTHON ?= python3.11
ASCEND := .venv/ascend
ASCEND_PIP := $(ASCEND)/bin/python -m pip install $(PIP_FLAGS) --no-deps
ASCEND_REQUIREMENTS := requirements/ascend-cpu.txt
ASCEND_PROFILES := A2 A5
# What both profiles share is tested on one of them.
export ASCEND_TESTS ?= not slow
TEST_TARGETS += test-ascend
SLOW_TARGETS += test-ascend-slow

# vllm-ascend is built from its source without its kernels; its set-up imports torch, so it goes after the rest.
$(ASCEND)/.ready: $(ASCEND_REQUIREMENTS) pyproject.toml
	$(ASCEND_PYTHON) -m venv --clear $(ASCEND)
	grep -v '^vllm-ascend' $(ASCEND_REQUIREMENTS) | $(ASCEND_PIP) -r /dev/stdin
	grep '^vllm-ascend' $(ASCEND_REQUIREMENTS) | SOC_VERSION=ascend910b1 COMPILE_CUSTOM_KERNELS=0 \
	  SETUPTOOLS_SCM_PRETEND_VERSION=$$(sed -n 's/^vllm-ascend==//p' $(ASCEND_REQUIREMENTS)) \
	  PATH="$(CURDIR)/$(ASCEND)/bin:$$PATH" $(ASCEND_PIP) --no-build-isolation -r /dev/stdin
	$(ASCEND_PIP) --no-build-isolation -e .
	@touch $@

.PHONY: setup-ascend test-ascend test-ascend-slow demo-ascend
.PHONY: $(ASCEND_PROFILES:%=test-ascend-%) $(ASCEND_PROFILES:%=demo-ascend-%)

setup-ascend: $(ASCEND)/.ready  ## Make the environment of the Ascend host on a CPU.

# The emulated device is chosen at import, so each hardware profile is a process; they run side by side.
test-ascend: $(ASCEND)/.ready  ## Tests of the Ascend host, A2/A3 and A5 profiles, on emulated operators.
	$(MAKE) --no-print-directory -j2 --output-sync=target $(ASCEND_PROFILES:%=test-ascend-%)

$(ASCEND_PROFILES:%=test-ascend-%): test-ascend-%: $(ASCEND)/.ready
	NPU_EMU_DEVICE=$* OMP_NUM_THREADS=1 $(ASCEND)/bin/python -m pytest -q -p no:cacheprovider --durations=15 -m "$(ASCEND_TESTS)" tests/ascend

test-ascend-slow: ASCEND_TESTS = slow
test-ascend-slow: test-ascend  ## Every way to share rows, on the other profile too.

demo-ascend: $(ASCEND_PROFILES:%=demo-ascend-%)  ## Decoder replay through the real vllm-ascend engine, off and on.

$(ASCEND_PROFILES:%=demo-ascend-%): demo-ascend-%: $(ASCEND)/.ready
	NPU_EMU_DEVICE=$* OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(ASCEND)/bin/python examples/ascend_demo.py
