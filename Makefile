# Every target does its own set-up: all that a machine needs is Python >= 3.11, make and the package registries.
#   make PYTHON=python3.13 test      another interpreter (only asked when .venv is made)
#   make test TESTS=tests/unit       a part of the tests
#   make demo ARGS='--json'          arguments for the command behind a target

PYTHON ?= python3
BIN := .venv/bin
TESTS ?= tests
CLUSTER_TESTS ?= tests/cluster
BASE ?= main
ARGS ?=
SEEDS ?= 2000
REGISTRY ?= localhost
# Many tests start several ranks of their own, so more processes than two buy little and cost memory.
TEST_PROCESSES ?= 2
# Only what has changed is built anew; a link that leads nowhere is an error.
DOCS = $(BIN)/sphinx-build --quiet --fail-on-warning --doctree-dir build/doctrees docs build/docs

# The environment must hold what pyproject.toml names and nothing that happens to lie around on the machine.
unexport PYTHONPATH
unexport PYTHONHOME
# Each of the many processes of a gang would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE := 1

.DEFAULT_GOAL := help
.PHONY: help venv venv-run demo demo-finetune up docs test test-changed test-long test-cluster test-gpu test-rules lint format types generated images sim sim-mutants drill-checkpoint drill-faults drill-programs drill-spot ci clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

venv: ## .venv with every extra and the development tools
	@$(PYTHON) tools/setup_venv.py dev

venv-run:
	@$(PYTHON) tools/setup_venv.py run

demo: venv-run ## recovery in a few minutes: submit, train, lose a worker, resume, finish
	$(BIN)/muster demo $(ARGS)

demo-finetune: venv ## a model in transformers' layout: pretrained, fine-tuned, taught preferences by QLoRA while a rank is killed, opened again
	$(BIN)/muster demo --finetune $(ARGS)

# The documents at its /docs are worth a line when they can't be built, and no platform that doesn't start.
up: venv-run ## the platform on this machine: API, operator and workers
	@$(DOCS) >/dev/null || echo "The documents could not be built, so /docs is without them: make docs says why." >&2
	$(BIN)/muster up $(ARGS)

docs: venv-run ## the documents as a site with search, in build/docs; links are checked
	$(DOCS)
	@echo "Open build/docs/index.html, or /docs of a running platform."

# The files that took longest when `make test ARGS=--record-durations` was last run come first (tests/conftest.py).
test: venv ## the tests, at most a quarter of an hour on two cores; the slowest, and skipped ones with their reasons, are listed
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not long" --durations 25 $(TESTS) $(ARGS)

test-changed: venv ## those of the tests that a change can reach by imports: make test-changed BASE=origin/main
	files=$$($(BIN)/python tools/changed_tests.py --base $(BASE)) && \
		$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not long" $$files $(ARGS)

test-long: venv ## the tests marked `long`, at most three quarters of an hour on two cores
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m long --durations 25 $(TESTS) $(ARGS)

test-cluster: venv ## the operator on a real control plane, whose binaries KUBEBUILDER_ASSETS names
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m cluster $(CLUSTER_TESTS) $(ARGS)

images: ## the three container images: make images REGISTRY=registry.example.com/ml ARGS='--build-arg …'
	@$(PYTHON) tools/build_images.py --registry $(REGISTRY) $(ARGS)

test-gpu: venv ## what only a GPU can show, within ten minutes, in one table; without one: what a CPU can
	$(BIN)/python -m tests.gpu.rehearsal $(ARGS)

test-rules: venv ## recording and alert rules by promtool: each alert has a case that fires and one that does not
	$(BIN)/python -m pytest -q tests/rules $(ARGS)

lint: venv ## style, formatting and import rules
	@failed=0; for check in "ruff check ." "ruff format --check ." "lint-imports --no-logo"; do \
		echo "$(BIN)/$$check"; $(BIN)/$$check || failed=1; done; exit $$failed

format: venv ## put style and formatting right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: venv ## strict mypy over the three source roots
	$(BIN)/mypy

generated: venv ## committed files that a script writes are what the script writes today
	@for script in $(wildcard tools/generate_*.py); do \
		echo "$(BIN)/python $$script --check"; $(BIN)/python $$script --check || exit 1; done

sim: venv ## the operator's core in a seeded world: make sim SEEDS=10000
	$(BIN)/python tests/sim/run.py --seeds $(SEEDS) $(ARGS)

sim-mutants: venv ## planted mistakes in the core; the simulation must find each
	$(BIN)/python tests/sim/mutants.py $(ARGS)

drill-checkpoint: venv ## hundreds of seeded faults against checkpoints: make drill-checkpoint ARGS='--rounds 4'
	$(BIN)/python -m tests.drills.checkpoint.drill $(ARGS)

drill-faults: venv ## every kind of fault on a real platform: make drill-faults ARGS='--rounds 3 --only nan,hang'
	$(BIN)/python -m tests.drills.faults.drill $(ARGS)

drill-programs: venv ## every kind of fault against a user's own program: make drill-programs ARGS='--lanes 3 --compare torchrun'
	$(BIN)/python -m tests.drills.programs.drill $(ARGS)

drill-spot: venv ## spot notices against training, with a store that refuses one in ten: make drill-spot ARGS='--notices 10'
	$(BIN)/python -m tests.drills.spot.drill $(ARGS)

ci: ## what the build server runs
	.ci/run

clean: ## remove caches and build outputs; jobs and their state stay
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find services operator trainer_image tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## clean, and remove the virtual environment too
	rm -rf .venv .venv.lock
