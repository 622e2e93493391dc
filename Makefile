# Two commands do everything on a machine that has only Python: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# pip would compile all 20,000 modules, of which the tests import a fifth: Python compiles each when it is imported, and
# must be allowed to keep what it compiled.
export PYTHONDONTWRITEBYTECODE :=

# A download that breaks off is tried again.
retried = n=0; until $(1); do n=$$((n + 1)); [ $$n -lt 4 ] || exit 1; sleep 5; done

EXAMPLES := rainbow r2d2 two_doors apex her behaviour_cloning offline tic_tac_toe grpo

.PHONY: demo examples docs links tutorials gallery test test-slow matrix faults gpu-check style weigh lint bench bench-compare clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(call retried,$(BIN)/python -m pip install --quiet --upgrade pip)
	$(call retried,$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test]')
	touch $@

demo: $(STAMP)  ## train on CartPole through both doors
	$(BIN)/python examples/demo.py

examples: $(STAMP)  ## some minutes each: whole pipelines, which fail where nothing was learned
	status=0; for each in $(EXAMPLES); do $(BIN)/python examples/$$each.py || status=1; done; exit $$status

# The tests compile thousands of small programs; XLA's emitters without MLIR need about half the time for each. XLA ends
# the process if it does not know a flag: this one is for the jaxlib of constraints.txt. `make test-slow` and plain
# `pytest` compile as users do.
QUICK_XLA := --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0

test: style  ## what CI runs; the collection beside mypy leaves compiled modules for the workers
	$(BIN)/python -m pytest --collect-only -qq >/dev/null & $(BIN)/mypy && wait
	XLA_FLAGS="$(QUICK_XLA) $$XLA_FLAGS" $(BIN)/python -m pytest -n auto --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

matrix:  ## hours: the tests with each Python that is here, and with the lowest versions; writes the table of docs/know/versions.md
	$(PYTHON) .ci/matrix.py $(ARGS)

faults: $(STAMP)  ## about an hour: kills, full disks, lost writes, damage; writes the table of docs/know/reliability.md
	$(BIN)/python -m tests.faults

gpu-check:  ## some minutes: compile for an H100, without one, and count what it would run; a card needs no more than before
	$(PYTHON) -m venv $(VENV)-gpu
	$(call retried,$(VENV)-gpu/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[gpu-check]')
	$(VENV)-gpu/bin/python -W ignore -m tests.gpu.compiled --batch 256 & \
	$(VENV)-gpu/bin/python -W ignore -m tests.gpu.compiled --batch 65536 && wait $$!

style: $(STAMP)  ## ruff, the layers that imports may not cross, and the limits of `make weigh`, which only fall
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python .ci/weigh.py --check

# A site of files: open docs/_build/html/index.html. Warnings are errors. Outputs of tutorials are stored in docs/outputs.
DOCS_STAMP := $(VENV)/.installed-docs

$(DOCS_STAMP): $(STAMP)
	$(call retried,$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[docs]')
	touch $@

docs: $(DOCS_STAMP)  ## the site, into docs/_build/html, in less than three minutes; needs no network
	$(BIN)/python -m sphinx -q -W --keep-going -j 2 -b html -d docs/_build/doctrees docs docs/_build/html

links: $(DOCS_STAMP)  ## minutes: follow the links of the site to other sites; needs the network. `make test` has those between pages
	$(BIN)/python -m sphinx -q -j 2 -b linkcheck -d docs/_build/doctrees docs docs/_build/links

tutorials: $(DOCS_STAMP)  ## minutes: execute the tutorials anew and store their outputs; ARGS="dqn" executes one
	$(BIN)/python docs/tools/stored_outputs.py $(ARGS)

gallery: $(DOCS_STAMP)  ## half an hour: run the examples, and draw their curves; ARGS="dqn_torch" runs one, ARGS=--draw only draws
	$(BIN)/python docs/tools/gallery.py $(ARGS)

weigh: $(STAMP)  ## what a reader must hold in mind: large classes, circles, imports upward, halves of classes, names with two meanings
	$(BIN)/python .ci/weigh.py

lint: style
	$(BIN)/mypy

# All rivals that can be installed here; ARGS="--only torch_uniform --repeats 3" and the like are passed on.
bench: $(STAMP)  ## an hour or more; numbers into benchmarks/results, plots into docs/plots
	-$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/run.py --plots docs/plots $(ARGS)

bench-compare: $(STAMP)  ## what became slower: make bench-compare A=old.json B=new.json
	$(if $(and $(A),$(B)),,$(error two files of results are needed: make bench-compare A=old.json B=new.json))
	$(BIN)/python benchmarks/compare.py $(A) $(B) $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-gpu .venv-matrix dist docs/_build docs/lookup/reference .mypy_cache .ruff_cache .pytest_cache build *.egg-info
