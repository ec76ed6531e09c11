# Two targets do everything: `make train` and `make test`. Both set up the environment first, once.
#
#   PYTHON=python3.12      the interpreter that makes the environment
#   VENV=path              another environment; an existing one is used as it is
#   CONSTRAINTS=           no pinned versions: keeps a torch (>= 2.11) that the environment already has
#   DATA=path              train on this file or folder instead of the standard library's source
#   SESSIONS=1             how many sessions of `make test` run side by side; without it one for each core, up to four
#   ARGS="--steps 100"     further arguments of the training job, or of pytest for `make test`

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
DATA ?=
SESSIONS ?= auto
ARGS ?=

py := $(VENV)/bin/python
install := $(py) -m pip install $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# Extras that tests use where they can be had.
clients := transformers accelerate lightning peft docs optimizers
comma := ,

# Ranks share the cores: with more threads each they take turns instead of computing.
export OMP_NUM_THREADS ?= 1
# Every rank imports the tests: where Python is told to keep no bytecode, each would compile them anew.
test: export PYTHONDONTWRITEBYTECODE =

.PHONY: help train test lint bench docs clean

help:
	@echo "make train   sharded training of a small GPT, then checks (DATA=path for your own text)"
	@echo "make test    the whole test suite"
	@echo "make lint    ruff and mypy"
	@echo "make bench   step time, memory and overhead against the peers"
	@echo "make docs    the documentation site, in build/site"
	@echo "make clean   remove the output of training and the tools' caches; keeps $(VENV)"

train: $(VENV)/.fsdp-train
	$(py) -m examples.gpt.launch $(if $(DATA),--data "$(DATA)") $(ARGS)

test: $(VENV)/.fsdp-test $(VENV)/.fsdp-clients $(VENV)/.fsdp-lightning-1.9
	$(py) -m pytest --sessions $(SESSIONS) $(ARGS)

lint: $(VENV)/.fsdp-dev
	$(py) -m ruff check .
	$(py) -m mypy

bench: $(VENV)/.fsdp-train
	$(py) -m benchmarks.step $(ARGS)
	$(py) -m benchmarks.overhead
	$(py) -m benchmarks.lora

# To be opened as files, without a network. Made anew, since a build on an earlier one may lose words of the search.
docs: $(VENV)/.fsdp-docs
	$(py) -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs build/site
	@echo "built: build/site/index.html"

clean:
	rm -rf runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

# One stamp for each extra: remade when what it installs may have changed, so that a second call starts at once.
$(VENV)/.fsdp-%: $(VENV)/pyvenv.cfg setup.py $(CONSTRAINTS)
	$(py) -m pip --version >/dev/null 2>&1 || $(py) -m ensurepip
	$(install) -e ".[$*]"
	@touch $@

# In one installation. The tests that need one of these skip without it, so where the index has it not, the others are
# installed by themselves.
$(VENV)/.fsdp-clients: $(VENV)/.fsdp-test
	$(install) -e ".[$(subst $() ,$(comma),$(clients))]" || for extra in $(clients); do \
		$(install) -e ".[$$extra]" || echo "$$extra could not be installed: the tests that need it are skipped"; done
	@touch $@

# The last Lightning with a strategy for FairScale, in a folder that only its tests look into. It imports pkg_resources,
# which later setuptools do not have.
$(VENV)/.fsdp-lightning-1.9: $(VENV)/.fsdp-clients
	$(py) -m pip install --no-deps --target $(VENV)/lightning-1.9 --upgrade pytorch_lightning==1.9.5 "setuptools<81" \
		|| echo "Lightning 1.9 could not be installed: the tests that need it are skipped"
	@touch $@
