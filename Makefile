# `run` and `test` need Python 3.11 or newer and make, nothing else. They build an environment in .venv, with uv if it is
# on PATH and with pip otherwise: `run` installs what serving needs, `test` and `check` add what they need. They build it
# again only if a lock, pyproject.toml, the path of this directory, PYTHON or the installer has changed.

PYTHON ?=
VENV ?= .venv
UV ?= $(shell command -v uv 2>/dev/null)
PORT ?= 8765
PYTEST_ARGS ?=
BENCH_ARGS ?=
LOCK_ARGS ?=
# The lock of `make test`.
LEVEL ?= test

# Checked by content, because the time of a file says nothing after a checkout or a copy. The directory is part of the
# key because neither the scripts of an environment nor an editable install work after a move.
KEY := $(shell { cat requirements/*.lock pyproject.toml; echo '$(CURDIR) $(PYTHON) $(if $(UV),uv,pip)'; } \
	| cksum | cut -d ' ' -f 1)
CREATED := $(VENV)/.created-$(KEY)
# The files that mark requirements/NAME.lock as installed.
RUN := $(VENV)/.run-$(KEY)
TEST := $(VENV)/.$(LEVEL)-$(KEY)
DEV := $(VENV)/.dev-$(KEY)
BIN := $(VENV)/bin

# The oldest comes first, because every feature must work on it. `python3` may be any version, so it comes last.
CANDIDATES := $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3.14 python3)
# A version manager may put a command on PATH that runs no Python, and Debian has ensurepip in a package of its own. So
# each candidate is run, and prints its own path.
IS_NEW := import sys; assert sys.version_info >= (3, 11)
PROBE := $(IS_NEW); import venv, ensurepip; print(sys.executable)

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-newest test-adapters stress coverage check dist bench bench-peers sdk-suite screenshot lock format clean

help: ## list the targets
	@echo 'Targets:'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F '|' '{ printf "%-16s%s\n", $$1, $$2 }'
	@echo 'Variables:'
	@echo '  PYTHON=…       the Python to use, 3.11 or newer (otherwise the first one found)'
	@echo '  VENV=…         the directory of the environment (otherwise .venv)'
	@echo '  UV=            build the environment with pip, even if uv is present'
	@echo '  PORT=…         the port of make run (otherwise 8765)'
	@echo '  PYTEST_ARGS=…  LOCK_ARGS=…  BENCH_ARGS=…  passed on'

# Serves a copy, so that the checkout stays as it is. The copy is kept for the next time. The port is tried before the
# addresses are printed, because another program may answer there.
run: $(RUN) ## serve the example workspace over HTTP, and say what to try
	@$(BIN)/python -c 'import socket; socket.create_server(("127.0.0.1", $(PORT))).close()' 2>/dev/null || \
		{ echo 'Port $(PORT) cannot be used: stop the program that uses it, or choose another port: make PORT=9000 run' >&2; exit 1; }
	@[ -d .run/workspace ] || { mkdir -p .run && cp -R examples/workspace .run/workspace; }
	@printf '%s\n' \
		'This serves .run/workspace, a copy of examples/workspace that is kept until `make clean`.' \
		'Try, in another terminal:' \
		"  $(BIN)/tidings watch http://127.0.0.1:$(PORT)/mcp --feature tools --uri 'workspace:///**'" \
		'and in a third one, while that watches:' \
		"  printf 'def hello() -> str:\n    return \"hi\"\n' > .run/workspace/tools/hello.py" \
		"  $(BIN)/python examples/call.py http://127.0.0.1:$(PORT)/mcp add_task title='Ship it'" \
		'  rm .run/workspace/tools/hello.py' ''
	@exec $(BIN)/tidings serve .run/workspace --port $(PORT)

# Most tests wait for a process that they have started, so three files run side by side, also on two cores. Tests that
# measure time run one by one afterwards. With PYTEST_ARGS there is one run of pytest, over all tests.
define RUN_TESTS
failed=0; \
$(BIN)/python -m pytest -m 'not alone$(1)' -n 3 --dist loadfile --no-loadscope-reorder || failed=1; \
$(BIN)/python -m pytest -m 'alone$(1)' || failed=1; \
exit $$failed
endef

test: $(TEST) ## run the tests that are fast and need nothing but Python (5 minutes)
ifeq ($(strip $(PYTEST_ARGS)),)
	@$(call RUN_TESTS, and not slow and not node and not browser)
else
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

test-all: $(DEV) ## run all tests; those that need Node packages or Chromium are skipped if it is missing
	@$(RUN_TESTS)

test-newest: ## run the tests of make test with the newest versions that pyproject.toml admits, in .venv-newest
	@rm -rf .venv-newest
	@$(MAKE) --no-print-directory VENV=.venv-newest LEVEL=newest test

test-adapters: ## test and type-check the adapters of agent frameworks, with the frameworks, in .venv-adapters
	@$(MAKE) --no-print-directory VENV=.venv-adapters LEVEL=adapters PYTEST_ARGS=tests/client/adapters test
	@.venv-adapters/bin/mypy src/tidings/client/adapters tests/client/adapters

stress: $(TEST) ## run the random tests whole, of which make test runs a sample
	@TIDINGS_STRESS=1 $(BIN)/python -m pytest -m 'stress or hypothesis' -o timeout=7200 $(PYTEST_ARGS)

coverage: $(DEV) ## check that the tests of core/ run at least 95 % of it, lines and branches
	@$(BIN)/python -m coverage run -m pytest -q -m 'not slow' tests/core tests/support
	@$(BIN)/python -m coverage report --skip-covered --show-missing

check: $(DEV) ## lint, formatting and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist: $(DEV) ## build the wheel and the sdist into dist/
	rm -rf dist
	$(BIN)/python -m hatchling build

bench: $(DEV) ## measure the core as ratios, and the folder server
	@$(BIN)/python bench/core.py $(BENCH_ARGS)
	@$(BIN)/python bench/workspace.py $(BENCH_ARGS)

bench-peers: $(DEV) ## measure Tidings beside its peers (needs a C compiler)
	@$(BIN)/python -m bench.peers $(BENCH_ARGS)

sdk-suite: $(DEV) ## run the SDK's own tests with every server in Live, and explain each difference
	@$(BIN)/python -m tests.sdk_suite

screenshot: $(DEV) ## make the pictures of README.md and docs/console.md (needs Chromium)
	@$(BIN)/python docs/recording.py
	@$(BIN)/python docs/console_screenshots.py

format: $(DEV) ## format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

FRAMEWORKS := google-adk langchain openai-agents pydantic-ai
COMPILE = "$(UV)" pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-emit-build-options --no-emit-index-annotation \
	--custom-compile-command 'make lock' $(LOCK_ARGS)
# The locks below it use the versions of dev.lock. Each contains the build backend, which installs the checkout.
SUBSET = printf 'hatchling\n' | $(COMPILE) - --constraint requirements/dev.lock

# The files contain no addresses, so that they work with every index. Versions stay as they are if pyproject.toml allows
# it; LOCK_ARGS=--upgrade updates them.
lock: ## write the lock files from pyproject.toml (needs uv)
	@command -v "$(UV)" >/dev/null || { echo 'make lock needs uv: pip install uv' >&2; exit 1; }
	$(COMPILE) --extra dev --output-file requirements/dev.lock
	$(SUBSET) --output-file requirements/run.lock
	$(SUBSET) --extra nats --output-file requirements/image.lock
	$(SUBSET) --extra all --extra test --output-file requirements/test.lock
	printf 'hatchling\nmypy\n' | $(COMPILE) - $(FRAMEWORKS:%=--extra %) --extra test --output-file requirements/adapters.lock
	@if grep -n '://' requirements/*.lock; then echo 'a lock file names an address' >&2; exit 1; fi

clean: ## remove the environments, caches, builds and the copy that make run serves
	rm -rf .venv .venv-* .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage htmlcov build dist .run
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED):
	@set -eu; \
	python=; \
	for candidate in $(CANDIDATES); do \
		if python=$$("$$candidate" -c '$(PROBE)' 2>/dev/null); then break; else python=; fi; \
		if "$$candidate" -c '$(IS_NEW)' 2>/dev/null; then \
			echo "$$candidate has no venv or ensurepip (on Debian and Ubuntu: apt install python3-venv)" >&2; \
		fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo 'Tidings needs Python 3.11 or newer, with venv and pip; tried:' $(CANDIDATES) >&2; \
		echo 'Install one (on Debian and Ubuntu: python3 and python3-venv), or name it: make PYTHON=/path/to/python3.11 …' >&2; \
		exit 1; \
	fi; \
	rm -rf "$(VENV)"; \
	$(CREATE) || { echo '$(ADVICE)' >&2; exit 1; }; \
	touch $@

ifneq ($(UV),)
CREATE = "$(UV)" venv --quiet --python "$$python" "$(VENV)"
INSTALL := "$(UV)" pip install --quiet --python $(BIN)/python
ADVICE := uv failed, see above. To use pip instead: make UV= …
else
CREATE = "$$python" -m venv "$(VENV)"
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
ADVICE := pip failed, see above. If it finds no packages, check the network and `pip config list`; \
	if it fails by itself, run `$(BIN)/python -m pip install --upgrade pip`. Then repeat the make command.
endif

# The locks are complete, so nothing is resolved: pip before 23.3 refuses a lock in which a package requires another one
# with an extra.
$(VENV)/.%-$(KEY): $(CREATED)
	@echo 'Installing requirements/$*.lock into $(VENV) with $(if $(UV),uv,pip); this takes up to a minute, once …'
	@{ $(INSTALL) --require-hashes --no-deps -r requirements/$*.lock && $(INSTALL) --no-deps --no-build-isolation -e .; } \
		|| { echo '$(ADVICE)' >&2; exit 1; }
	@touch $@

$(VENV)/.newest-$(KEY): $(CREATED)
	@echo 'Installing the newest versions into $(VENV) …'
	@$(INSTALL) --upgrade -e '.[all,test]'
	@touch $@
