# The Triton kernels: compiled for Ascend and run on this machine's processor. `make bench-gpu` measures them.

KERNELS := .venv/kernels
KERNELS_PYTHON ?= python3.11
TEST_TARGETS += check-kernels

$(KERNELS)/.ready: requirements/kernels.txt
	$(KERNELS_PYTHON) -m venv --clear $(KERNELS)
	$(KERNELS)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/kernels.txt
	@touch $@

.PHONY: check-kernels

check-kernels: $(KERNELS)/.ready  ## Compile the kernels for Ascend up to hivmc and run the lowered code on this CPU.
	$(KERNELS)/bin/python -m tools.check_kernels
