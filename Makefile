# pdserve: `make help` lists what there is.
#
# One environment in .venv. What serving needs goes in first; linters, mypy and test tools are added
# by the targets that use them, so that `make run` doesn't wait for them.

CONFIG ?= deploy/configs/trial.yaml
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STUBS := build/stubs
MARKERS := gpu faults smollm clients slow
NO_INSTALL = { echo 'pdserve: the environment is not whole, for the reason above. Without a' \
	'network, point pip to what you have (PIP_INDEX_URL, PIP_PROXY, PIP_FIND_LINKS, or TORCH' \
	'and TORCH_INDEX for torch alone), then run the same command again.' >&2; exit 1; }
# $(call protoc,FOLDER) generates the wire code into FOLDER.
protoc = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=$(1) --mypy_grpc_out=$(1) \
	proto/cluster/wire/*.proto

.DELETE_ON_ERROR:
.PHONY: help run test test-marked $(MARKERS:%=test-%) check lint types imports stubs gen bench clean

help:
	@echo 'make run            start the trial cluster, prove it, serve until Ctrl-C'
	@echo '                    ONCE=1 exits after the proof; CONFIG=FILE; MODEL=FOLDER_OR_HF_ID;'
	@echo '                    ARGS=OPTIONS of `pdserve serve`: ARGS="--set endpoints.http_port=8100"'
	@echo 'make test           default tests'
	@echo 'make test-marked    tests that take longer or need the trial model'
	@echo 'make check          lint, format, types, import contracts, generated code'
	@echo 'make gen            generate cluster/wire from proto/'
	@echo 'make bench          measure against references'
	@echo 'make clean          remove the environment and what was built (not the model cache)'
	@echo
	@echo 'PYTHON=EXECUTABLE, TORCH=REQUIREMENT ($(TORCH)) and TORCH_INDEX=URL choose the'
	@echo 'interpreter and the build of torch when .venv is made; `make clean` to choose again.'

run: .venv/.installed
	@$(BIN)/pdserve serve --config $(CONFIG) $(if $(MODEL),--model $(MODEL)) $(if $(ONCE),--once) \
		$(ARGS)

# Two processes: what thousands of event loops have left in grpc's core, which all loops of a process
# share, ends before clusters are started. A serving process has one loop for all of its life.
test: .venv/.installed-dev
	$(BIN)/pytest --ignore=tests/e2e --ignore=tests/integration
	$(BIN)/pytest tests/e2e tests/integration

# One marker after the other, so that no two of them want the cores, the memory or the default
# ports at once. pytest says 5 where a marker has no test here, which is no failure.
test-marked: $(MARKERS:%=test-%)

$(filter-out test-slow,$(MARKERS:%=test-%)): test-%: .venv/.installed-dev
	@echo '--- pytest -m $*'
	@$(BIN)/pytest -m '$*' --durations=10 || test $$? -eq 5

# These hold whole clusters to seconds of real time, which a shared machine may take away for a while:
# what failed is played once more, alone, and both runs are printed. Faults are never played again.
# With SLOW_TESTS_UNTIL (seconds since the epoch) those that would begin later are skipped by name.
test-slow: .venv/.installed-dev
	@echo '--- pytest -m slow'
	@$(BIN)/pytest -m slow --durations=10 || { test $$? -eq 1 && echo '--- what failed, once more' && \
		env -u SLOW_TESTS_UNTIL $(BIN)/pytest -m slow --maxfail=1 --last-failed --last-failed-no-failures=none; }

check: lint types imports stubs

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed-dev
	$(BIN)/mypy

imports: .venv/.installed-dev
	$(BIN)/lint-imports

stubs: .venv/.installed-dev
	@rm -rf $(STUBS) && mkdir -p $(STUBS)
	@$(call protoc,$(STUBS))
	@diff -r --exclude=__init__.py --exclude=__pycache__ $(STUBS)/cluster/wire cluster/wire \
		|| { echo 'cluster/wire is not what proto/ generates: run `make gen`' >&2; exit 1; }

gen: .venv/.installed-dev
	@$(call protoc,.)

bench: .venv/.installed
	@$(BIN)/pdserve bench

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info

# A stamp is written when its step is whole, so an interrupted step is done again.

.venv/.created:
	@test -n '$(PYTHON)' || { echo 'pdserve needs Python 3.11 or newer, and none was found:' \
		'install it, or name it with PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo '$(PYTHON) is not a Python 3.11 or newer: name one with PYTHON=/path/to/python' >&2; \
		exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo '$(PYTHON) has no venv module: install it (on Debian and Ubuntu: its -venv package)' >&2; \
		exit 1; }
	@echo 'Making the environment in .venv (once). It downloads with pip, by its own configuration:'
	@echo '  $(TORCH)$(if $(TORCH_INDEX), from $(TORCH_INDEX)): 200 MB as a build for CPUs, 1 GB and'
	@echo '    its CUDA libraries of 2 to 3 GB otherwise; TORCH_INDEX=URL or TORCH=REQUIREMENT choose'
	@echo '  ray, transformers and the rest: 140 MB'
	@echo '.venv then takes 1.6 GB with a build for CPUs. The trial model comes later: 93 MB, and'
	@echo '273 MB in its cache (~/.cache/pdserve, or PDSERVE_CACHE).'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@touch $@

.venv/.torch: .venv/.created .venv/constraints.txt
	@# A torch index need not have the pinned versions of what torch itself needs.
	@$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),-c .venv/constraints.txt) '$(TORCH)' || $(NO_INSTALL)
	@touch $@

# Without torch's own pin: TORCH has chosen it already.
.venv/constraints.txt: constraints.txt .venv/.created
	@grep -v '^torch==' constraints.txt > $@

.venv/.installed: .venv/.torch .venv/constraints.txt pyproject.toml
	@$(PIP) install -c .venv/constraints.txt hatchling editables || $(NO_INSTALL)
	@$(PIP) install -c .venv/constraints.txt --no-build-isolation -e . || $(NO_INSTALL)
	@touch $@

.venv/.installed-dev: .venv/.installed
	@$(PIP) install -c .venv/constraints.txt --no-build-isolation -e '.[dev]' || $(NO_INSTALL)
	@touch $@
