# The documentation: built with every warning an error, into site/; and the small measurements that it shows.

DOCS := .venv/docs
TEST_TARGETS += docs

$(DOCS)/.ready: requirements/docs.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/docs.txt
	@touch $@

.PHONY: docs docs-serve bench-stats

docs: $(DOCS)/.ready  ## Build the documentation into site/; a warning fails it.
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet --site-dir site
	@echo "The documentation is in site/index.html"

docs-serve: $(DOCS)/.ready  ## Show the documentation while it is written.
	$(DOCS)/bin/mkdocs serve

bench-stats: $(CPU)/.ready  ## What the counters cost a step.
	$(CPU)/bin/python benchmarks/counters.py
