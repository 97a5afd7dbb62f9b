# The distribution: sdist and wheel, checked, and the wheel tried in an environment that holds nothing else.

PACKAGE := .venv/package
BARE := .venv/bare
TEST_TARGETS += package

$(PACKAGE)/.ready: requirements/package.txt
	$(PYTHON) -m venv --clear $(PACKAGE)
	$(PACKAGE)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/package.txt
	@touch $@

.PHONY: package

# Without vLLM the doctor must say so and exit with status 1.
package: $(PACKAGE)/.ready  ## Build sdist and wheel into dist/, check them, run the command from the wheel alone.
	rm -rf dist build
	$(PACKAGE)/bin/python -m build --no-isolation --outdir dist . > /dev/null
	$(PACKAGE)/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear $(BARE)
	$(BARE)/bin/python -m pip install -q --disable-pip-version-check dist/*.whl
	$(BARE)/bin/vllm-ascend-replay --version
	$(BARE)/bin/python -c "from importlib.resources import files; files('vllm_ascend_replay').joinpath('address_guard.cpp').read_text()"
	$(BARE)/bin/vllm-ascend-replay doctor --json $(BARE)/doctor.json > $(BARE)/doctor.txt; test $$? -eq 1
	grep -q "Decoder replay would not run: vLLM is not installed" $(BARE)/doctor.txt
	$(BARE)/bin/vllm-ascend-replay demo > $(BARE)/demo.txt; test $$? -eq 1
	grep -q "vLLM is not installed" $(BARE)/demo.txt
	@echo "The package is in dist/"
