# `run` and `test` need Python 3.11 or newer and make, nothing else. They build an environment in .venv from
# requirements.lock, with uv if it is on PATH and with pip otherwise. They build it again only if the lock,
# pyproject.toml, the path of this directory or PYTHON has changed.

PYTHON ?=
VENV ?= .venv
LOCK ?= requirements.lock
UV ?= $(shell command -v uv 2>/dev/null)
PYTEST_ARGS ?=
BENCH_ARGS ?=
LOCK_ARGS ?=

# Checked by content, because the time of a file says nothing after a checkout or a copy. The directory is part of the
# key because neither the scripts of an environment nor an editable install work after a move.
KEY := $(shell { cat $(LOCK) pyproject.toml; echo '$(CURDIR) $(PYTHON)'; } | cksum | cut -d ' ' -f 1)
READY := $(VENV)/.ready-$(KEY)
BIN := $(VENV)/bin

# The oldest comes first, because every feature must work on it. `python3` may be any version, so it comes last.
CANDIDATES := $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3.14 python3)
# A version manager may put a command on PATH that runs no Python, and Debian has ensurepip in a package of its own. So
# each candidate is run, and prints its own path.
PROBE := import sys; assert sys.version_info >= (3, 11); import venv, ensurepip; print(sys.executable)

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-adapters coverage check dist bench bench-peers sdk-suite screenshot lock format clean

help: ## list the targets
	@echo 'Targets:'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F '|' '{ printf "%-15s%s\n", $$1, $$2 }'
	@echo 'Variables:'
	@echo '  PYTHON=…       the Python to use, 3.11 or newer (otherwise the first one found)'
	@echo '  VENV=…         the directory of the environment (otherwise .venv)'
	@echo '  UV=            build the environment with pip, even if uv is present'
	@echo '  PYTEST_ARGS=…  LOCK_ARGS=…  BENCH_ARGS=…  passed on'

# Serves a copy, so that the checkout stays as it is. The copy is kept for the next time.
run: $(READY) ## serve the example workspace over HTTP, and say what to try
	@[ -d .run/workspace ] || { mkdir -p .run && cp -R examples/workspace .run/workspace; }
	@printf '%s\n' \
		'Try, in another terminal:' \
		"  $(BIN)/tidings watch http://127.0.0.1:8765/mcp --feature tools --uri 'workspace:///**'" \
		'and in a third one, while that watches:' \
		"  printf 'def hello() -> str:\n    return \"hi\"\n' > .run/workspace/tools/hello.py" \
		"  $(BIN)/python examples/call.py http://127.0.0.1:8765/mcp add_task title='Ship it'" \
		'  rm .run/workspace/tools/hello.py' ''
	@exec $(BIN)/tidings serve .run/workspace

# Most tests wait for a process that they have started, so three files run side by side, also on two cores. Tests that
# measure time run one by one afterwards. With PYTEST_ARGS there is one run of pytest, over all tests.
define RUN_TESTS
failed=0; \
$(BIN)/python -m pytest -m 'not alone$(1)' -n 3 --dist loadfile --no-loadscope-reorder || failed=1; \
$(BIN)/python -m pytest -m 'alone$(1)' || failed=1; \
exit $$failed
endef

test: $(READY) ## run the tests that are fast and need nothing but Python (5 minutes)
ifeq ($(strip $(PYTEST_ARGS)),)
	@$(call RUN_TESTS, and not slow and not node and not browser)
else
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

test-all: $(READY) ## run all tests; those that need Node packages or Chromium are skipped if it is missing
	@$(RUN_TESTS)

test-adapters: ## test and type-check the adapters of agent frameworks, with the frameworks, in .venv-adapters
	@$(MAKE) --no-print-directory VENV=.venv-adapters LOCK=$(ADAPTERS_LOCK) PYTEST_ARGS=tests/client/adapters test
	@.venv-adapters/bin/mypy src/tidings/client/adapters tests/client/adapters

coverage: $(READY) ## check that the tests of core/ run at least 95 % of it, lines and branches
	@$(BIN)/python -m coverage run -m pytest -q -m 'not slow' tests/core tests/testing
	@$(BIN)/python -m coverage report --skip-covered --show-missing

check: $(READY) ## lint, formatting and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist: $(READY) ## build the wheel and the sdist into dist/
	rm -rf dist
	$(BIN)/python -m hatchling build

bench: $(READY) ## measure the core as ratios, and the folder server
	@$(BIN)/python bench/core.py $(BENCH_ARGS)
	@$(BIN)/python bench/workspace.py $(BENCH_ARGS)

bench-peers: $(READY) ## measure Tidings beside its peers (needs a C compiler)
	@$(BIN)/python -m bench.peers $(BENCH_ARGS)

sdk-suite: $(READY) ## run the SDK's own tests with every server in Live, and explain each difference
	@$(BIN)/python -m tests.sdk_suite

screenshot: $(READY) ## make the pictures of README.md and docs/console.md (needs Chromium)
	@$(BIN)/python docs/recording.py
	@$(BIN)/python docs/console_screenshots.py

format: $(READY) ## format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ADAPTERS_LOCK := tests/client/adapters/requirements.lock
FRAMEWORKS := google-adk langchain openai-agents pydantic-ai
COMPILE = "$(UV)" pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-emit-build-options --no-emit-index-annotation \
	--custom-compile-command 'make lock'

# The files contain no addresses, so that they work with every index. Versions stay as they are if pyproject.toml allows
# it; LOCK_ARGS=--upgrade updates them.
lock: ## write the lock files from pyproject.toml (needs uv)
	@command -v "$(UV)" >/dev/null || { echo 'make lock needs uv: pip install uv' >&2; exit 1; }
	$(COMPILE) --extra all --extra dev --output-file requirements.lock $(LOCK_ARGS)
	$(COMPILE) $(FRAMEWORKS:%=--extra %) --extra dev --output-file $(ADAPTERS_LOCK) $(LOCK_ARGS)
	@if grep -n '://' requirements.lock $(ADAPTERS_LOCK); then echo 'a lock file names an address' >&2; exit 1; fi

clean: ## remove the environments, caches and builds
	rm -rf .venv .venv-* .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage htmlcov build dist
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
	rm -rf "$(VENV)"; \
	if [ -n "$(UV)" ]; then \
		echo "Building $(VENV) with uv and $$python …"; \
		{ \
			"$(UV)" venv --quiet --python "$$python" "$(VENV)" && \
			"$(UV)" pip install --quiet --python $(BIN)/python --require-hashes --no-deps -r $(LOCK) && \
			"$(UV)" pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .; \
		} || { echo 'uv could not build $(VENV). To build it with pip: make UV= …' >&2; exit 1; }; \
	else \
		echo "Building $(VENV) with pip and $$python; this takes a minute, once …"; \
		"$$python" -m venv "$(VENV)"; \
		$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps -r $(LOCK); \
		$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .; \
	fi; \
	touch $@
