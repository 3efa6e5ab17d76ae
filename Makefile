# Every target makes what it needs: `make run` and `make test` work from a bare clone.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?= zero=stage2 precision=bf16
# Two processes take the files of tests/ between them: ranks wait for each other, and one process leaves cores idle. In
# the order of the folders: by their number of tests, files with few long ones would come last.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
# Bytecode is kept: the tests start hundreds of interpreters, and each would compile the same files again.
unexport PYTHONDONTWRITEBYTECODE
# What `make check` runs after formatting, lint and types.
TESTS ?= test
# Of the file in examples/ that `make example` runs, and the words for it.
NAME ?= trainer

.PHONY: install run example test test-full test-platforms test-slurm check format bench gpu ui clean

install: .venv/.installed

.PHONY: help
help:
	@echo "make install    the program and what it needs, into .venv (run, test and check do so themselves)"
	@echo "make run        python run.py, with ARGS='zero=stage2 precision=bf16'"
	@echo "make example    NAME=plain_loop, trainer or generate_two_prompts, on 2 CPU ranks, with WORDS='--max_steps 20'"
	@echo "make test       a part of the tests that takes minutes; WORKERS=\"-n 4 --dist loadfile\" where there are more cores"
	@echo "make test-full  all of them, the long forms too, and the parity suite over gloo"
	@echo "make test-slurm jobs on a real SLURM, started here for the tests"
	@echo "make check      formatting, lint, types, make test"
	@echo "make bench, make gpu, make ui, make format, make clean"

# The stamp is newer than pyproject.toml when what that names is installed.
.venv/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (one to three minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

run: .venv/.installed
	$(BIN)/python run.py $(ARGS)

# The Trainer of transformers needs accelerate, which the program itself does not.
.venv/.installed-trainer: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[trainer]'
	@touch $@

example: .venv/.installed-trainer
	$(BIN)/python run.py launch --ranks 2 examples/$(NAME).py $(WORDS)

# How long it takes is in docs/platforms.md. Each file of tests/ says in its first line what it proves.
test: .venv/.installed-dev
	$(BIN)/python -m pytest $(WORKERS)

test-full: .venv/.installed-dev
	$(BIN)/python -m pytest $(WORKERS) -m "full or not full"
	ZERO_LAB_TEST_COMM=gloo $(BIN)/python -m pytest $(WORKERS) tests/parity

# Jobs on a real SLURM, started on this machine for the tests and ended after them: root and SLURM's packages needed.
test-slurm: .venv/.installed-dev
	$(BIN)/python -m pytest --override-ini addopts="-q -ra --strict-markers" tests/slurm

# A cut of the suite under what one machine can vary: vectors, libraries, threads, user, locale, arm64 under QEMU, builds
# of torch. PLATFORMS="torch-lowest torch-highest" names some; these two download gigabytes, and run only if named.
test-platforms: .venv/.installed-dev
	$(BIN)/python tests/platforms/run.py $(PLATFORMS)

check: .venv/.installed-dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet --output-format concise .
	$(BIN)/mypy
	$(MAKE) --no-print-directory $(TESTS)

format: .venv/.installed-dev
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

bench: .venv/.installed
	$(BIN)/python benchmarks/stages.py

# GPU tests and benchmarks; results, dated, into benchmarks/results/. Needs torch, numpy, safetensors and pytest only.
gpu:
	$(PYTHON) benchmarks/gpu.py

ui: .venv/.installed
	$(BIN)/python run.py ui

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
