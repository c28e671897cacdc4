# `run` and `test` need Python 3.11 or newer and make, nothing else. They build .venv from requirements.lock, with uv
# where it is on PATH and with pip elsewhere, and build it anew when the lock, pyproject.toml, the place of this
# directory or PYTHON has changed. Otherwise they start at once.

PYTHON ?=
UV ?= $(shell command -v uv 2>/dev/null)
PYTEST_ARGS ?=
BENCH_ARGS ?=
LOCK_ARGS ?=

# By content and not by time: a checkout or a copy may carry any time. The directory counts because neither the
# scripts of an environment nor an editable install survive a move.
KEY := $(shell { cat requirements.lock pyproject.toml; echo '$(CURDIR) $(PYTHON)'; } | cksum | cut -d ' ' -f 1)
READY := .venv/.ready-$(KEY)
BIN := .venv/bin

# The oldest first, because it is the one that every feature must work on. `python3` may be anything, so it comes last.
CANDIDATES := $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3.14 python3)
# A version manager's stub may be on PATH without a Python behind it, and Debian packs ensurepip apart: so each
# candidate is asked, and answers with its own path.
PROBE := import sys; assert sys.version_info >= (3, 11); import venv, ensurepip; print(sys.executable)

.DEFAULT_GOAL := help
.PHONY: help run test check bench bench-peers lock format clean

help: ## list the targets
	@echo 'Targets:'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F '|' '{ printf "%-13s%s\n", $$1, $$2 }'
	@echo 'Variables:'
	@echo '  PYTHON=…       the Python to use, 3.11 or newer (otherwise the first one found)'
	@echo '  UV=            build the environment with pip, even where uv is present'
	@echo '  PYTEST_ARGS=…  LOCK_ARGS=…  BENCH_ARGS=…  passed on'

# A copy, so that trying things leaves the checkout as it is; kept, so that what was tried is there the next time.
run: $(READY) ## serve the example workspace over HTTP, and say what to try
	@[ -d .run/workspace ] || { mkdir -p .run && cp -R examples/workspace .run/workspace; }
	@printf '%s\n' \
		'Try, in another terminal:' \
		"  $(BIN)/python examples/watch.py http://127.0.0.1:8765/mcp --uri 'workspace:///**'" \
		'and in a third one, while that watches:' \
		"  printf 'def hello() -> str:\n    return \"hi\"\n' > .run/workspace/tools/hello.py" \
		"  $(BIN)/python examples/call.py http://127.0.0.1:8765/mcp add_task title='Ship it'" \
		'  rm .run/workspace/tools/hello.py' ''
	@exec $(BIN)/tidings serve .run/workspace

# Most tests wait for a process that they have started, so two run side by side, a file at a time; those that measure
# time run by themselves. What is asked for in particular is one run of pytest.
test: $(READY) ## run the tests
ifeq ($(strip $(PYTEST_ARGS)),)
	@failed=0; \
	$(BIN)/python -m pytest -m 'not alone' -n 2 --dist loadfile --no-loadscope-reorder || failed=1; \
	$(BIN)/python -m pytest -m alone || failed=1; \
	exit $$failed
else
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

check: $(READY) ## lint, formatting and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## measure the core as ratios, and the folder server
	@$(BIN)/python bench/core.py $(BENCH_ARGS)
	@$(BIN)/python bench/workspace.py $(BENCH_ARGS)

bench-peers: $(READY) ## measure Tidings beside its peers (needs a C compiler)
	@$(BIN)/python -m bench.peers $(BENCH_ARGS)

format: $(READY) ## format the code, and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Addresses are kept out, so that the same file serves every index. Versions stay as they are as far as pyproject.toml
# allows; LOCK_ARGS=--upgrade moves them.
lock: ## write requirements.lock from pyproject.toml (needs uv)
	@command -v "$(UV)" >/dev/null || { echo 'make lock needs uv: pip install uv' >&2; exit 1; }
	"$(UV)" pip compile pyproject.toml --quiet --universal --python-version 3.11 --all-extras --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-emit-build-options --no-emit-index-annotation \
		--custom-compile-command 'make lock' --output-file requirements.lock $(LOCK_ARGS)
	@if grep -n '://' requirements.lock; then echo 'requirements.lock names an address' >&2; exit 1; fi

clean: ## remove the environment, caches and builds
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage htmlcov build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY):
	@set -eu; \
	python=; \
	for candidate in $(CANDIDATES); do \
		if python=$$("$$candidate" -c '$(PROBE)' 2>/dev/null); then break; else python=; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo 'Tidings needs Python 3.11 or newer, with venv and pip; tried:' $(CANDIDATES) >&2; \
		echo 'Install one (on Debian and Ubuntu: python3 and python3-venv), or name it: make PYTHON=/path/to/python3.11 …' >&2; \
		exit 1; \
	fi; \
	rm -rf .venv; \
	if [ -n "$(UV)" ]; then \
		echo "Building .venv with uv and $$python …"; \
		{ \
			"$(UV)" venv --quiet --python "$$python" .venv && \
			"$(UV)" pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock && \
			"$(UV)" pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .; \
		} || { echo 'uv could not build .venv. To build it with pip: make UV= …' >&2; exit 1; }; \
	else \
		echo "Building .venv with pip and $$python; this takes a minute, once …"; \
		"$$python" -m venv .venv; \
		$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements.lock; \
		$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .; \
	fi; \
	touch $@
