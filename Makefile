# Two commands matter: `make run` and `make test`. Both set everything up first, in .venv, and touch nothing outside.

PYTHON ?= python3
JOBS   ?= 4
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CONFS  := $(foreach name,sandblaster allreduce downpour hogwild,examples/conf/$(name).conf)
CODE   := topotrain tests examples benchmarks scripts docs/site
SITE   := build/site

.DEFAULT_GOAL := help
.PHONY: help setup run test soak bench bench-gpu chaos digests check docs proto format clean

help:
	@echo "make run     train on handwritten digits under the four frameworks: a table and a picture in workspace/compare"
	@echo "make test    run the tests, JOBS=$(JOBS) files at a time (make test ARGS='-k hogwild' runs some of them)"
	@echo "make soak    all seeds and cases, more examples, and a mutant of the source for each rule: hours"
	@echo "make bench   measure beside the peers for some 20 minutes (make bench ARGS='downpour starts' measures some)"
	@echo "make bench-gpu  measure on a machine with NVIDIA GPUs"
	@echo "make chaos   kill, damage and forge for up to an hour, and count (make chaos ARGS='--only C B --kills 50')"
	@echo "make digests compare the final bits of 56 synchronous jobs with the record (make digests ARGS='--only table')"
	@echo "make check   formatting, lint, types, imports; sizes beside their ceilings; what readers stumble over"
	@echo "make docs    build the documentation with search and API reference: $(SITE)/index.html"
	@echo "make format  put the code in the usual form"
	@echo "make proto   compile job.proto after a change"
	@echo "make setup   only the environment"
	@echo "make clean   remove what the others made"

setup: $(READY)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than 3.11: say make PYTHON=/path/to/a/newer/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What is said to pip, in its environment variables or its configuration files, holds for uv too, which reads neither.
# pip takes the best version of all indexes, and that is the meaning its users know; uv separates folders by commas.
# (`pip config list` and not `get`, which overlooks all but one of several files.)
said_to_pip = $$($(BIN)/python -m pip config list 2>/dev/null | sed -n "s/^\(global\|install\)\.$(1)='\(.*\)'$$/\2/p" \
  | sed 's/\\n/ /g' | xargs)

# One file for each extra of pyproject.toml that is there: `make run` installs a third of the packages of the tests.
# What a machine compiles when it imports, and does not keep, is compiled once: dependencies by uv, and our own package.
EXTRA = dev
$(READY)-examples: private EXTRA = examples
$(READY)-docs: private EXTRA = docs
$(READY)-docs: $(READY)
$(READY) $(READY)-examples $(READY)-docs: pyproject.toml constraints.txt Makefile $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	@links=$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-$(call said_to_pip,find-links)}}; \
	links=$$(echo $$links | tr ' ' ','); \
	index=$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$(call said_to_pip,index-url)}}; \
	extra=$${UV_EXTRA_INDEX_URL:-$${PIP_EXTRA_INDEX_URL:-$(call said_to_pip,extra-index-url)}}; \
	cert=$${SSL_CERT_FILE:-$${PIP_CERT:-$(call said_to_pip,cert)}}; \
	echo "uv pip install --compile-bytecode -c constraints.txt -e '.[$(EXTRA)]'"; \
	env $${links:+"UV_FIND_LINKS=$$links"} $${index:+"UV_DEFAULT_INDEX=$$index"} \
	  $${extra:+"UV_EXTRA_INDEX_URL=$$extra" UV_INDEX_STRATEGY=unsafe-best-match} $${cert:+"SSL_CERT_FILE=$$cert"} \
	  $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -b constraints.txt -e '.[$(EXTRA)]'
	@$(BIN)/python -m compileall -q topotrain
	@touch $@ $(if $(filter dev,$(EXTRA)),$(READY)-examples)

run: $(READY)-examples
	$(BIN)/topotrain compare --out workspace/compare $(CONFS) examples/digits.py

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

soak: setup
	TOPOTRAIN_SEEDS=all $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)
	$(BIN)/python -m tests.soak.mutants

bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks $(ARGS)

bench-gpu: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpu_training $(ARGS)

chaos: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.chaos $(ARGS)

digests: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak.digests $(ARGS)

check: setup
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy --strict
	$(BIN)/python -m pytest -q tests/test_imports.py
	$(BIN)/python scripts/code_metrics.py
	$(BIN)/python scripts/code_metrics.py --check

# Warnings are errors, a link that leads nowhere is one. Nothing is taken from a build that was interrupted (--fresh-env).
docs: $(READY)-docs
	@echo "building $(SITE) from docs/ and the docstrings …"
	$(BIN)/python -m sphinx --fresh-env --quiet --fail-on-warning --keep-going -b html -c docs/site -d build/doctrees . $(SITE)
	@echo "$(SITE)/index.html"

# After a change of job.proto.
proto: setup
	$(BIN)/python -m grpc_tools.protoc -I topotrain/config --descriptor_set_out=topotrain/config/job.binpb job.proto

format: setup
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

clean:
	rm -rf $(VENV) workspace build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
