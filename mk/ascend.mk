# The Ascend host on a CPU: the released vllm-ascend over emulated operators (docs/ascend.md).
# Every target sets up .venv/ascend by itself; nothing outside the repository is written.

ASCEND_PYTHON ?= python3.11
ASCEND_VENV := .venv/ascend
ASCEND_STAMP := $(ASCEND_VENV)/.ready
ASCEND_REQUIREMENTS := requirements/ascend-cpu.txt
# Two busy processes share two cores; more threads than cores make the small matrices here ten times slower.
ASCEND_ENV := OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR):$(CURDIR)/tests
ASCEND_PROFILES := A2 A5

# vllm-ascend is built from its source without its kernels; its set-up imports torch, so it goes last.
$(ASCEND_STAMP): $(ASCEND_REQUIREMENTS)
	rm -rf $(ASCEND_VENV)
	$(ASCEND_PYTHON) -m venv $(ASCEND_VENV)
	grep -v '^vllm-ascend' $< | $(ASCEND_VENV)/bin/python -m pip install -q --no-deps -r /dev/stdin
	grep '^vllm-ascend' $< | SOC_VERSION=ascend910b1 COMPILE_CUSTOM_KERNELS=0 \
	  SETUPTOOLS_SCM_PRETEND_VERSION=$$(sed -n 's/^vllm-ascend==//p' $<) \
	  PATH=$(CURDIR)/$(ASCEND_VENV)/bin:$$PATH \
	  $(ASCEND_VENV)/bin/python -m pip install -q --no-deps --no-build-isolation -r /dev/stdin
	touch $@

.PHONY: setup-ascend test-ascend demo-ascend $(ASCEND_PROFILES:%=test-ascend-%) $(ASCEND_PROFILES:%=demo-ascend-%)
setup-ascend: $(ASCEND_STAMP)

# The two hardware profiles need a process each (the emulated device is chosen at import) and run side by side.
test-ascend: $(ASCEND_STAMP)
	$(MAKE) --output-sync=target -j2 $(ASCEND_PROFILES:%=test-ascend-%)

$(ASCEND_PROFILES:%=test-ascend-%): test-ascend-%: $(ASCEND_STAMP)
	NPU_EMU_DEVICE=$* $(ASCEND_ENV) $(ASCEND_VENV)/bin/python -m pytest -q -p no:cacheprovider tests/ascend

demo-ascend: $(ASCEND_PROFILES:%=demo-ascend-%)

$(ASCEND_PROFILES:%=demo-ascend-%): demo-ascend-%: $(ASCEND_STAMP)
	NPU_EMU_DEVICE=$* $(ASCEND_ENV) $(ASCEND_VENV)/bin/python examples/ascend_demo.py
