# The main targets are `make train` and `make test`. Both create the environment first, once.
#
#   PYTHON=python3.12      the interpreter that makes the environment
#   VENV=path              another environment; an existing one is used as it is
#   CONSTRAINTS=           no pinned versions: keeps the environment's torch (>= 2.11)
#   DATA=path              train on this file or folder instead of the standard library's source
#   SESSIONS=1             number of parallel sessions of `make test`; by default one for each core, up to four
#   ARGS="--steps 100"     further arguments of the training job, or of pytest for `make test`

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
DATA ?=
SESSIONS ?= auto
ARGS ?=

py := $(VENV)/bin/python
install := $(py) -m pip install $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# Extras that tests use if they are available.
clients := transformers accelerate lightning peft docs optimizers checksums quantised
comma := ,

# Ranks share the cores: more threads per rank would compete for them.
export OMP_NUM_THREADS ?= 1
# The server of ranks imports the tests as well: without cached bytecode, it would compile them again.
test: export PYTHONDONTWRITEBYTECODE =

.PHONY: help train test lint bench gpu docs release clean

help:
	@echo "make train   sharded training of a small GPT, then checks (DATA=path for your own text)"
	@echo "make test    the whole test suite"
	@echo "make lint    ruff and mypy"
	@echo "make bench   step time, memory and overhead against the peers"
	@echo "make gpu     tests and benchmarks on this machine's GPUs, with a report (VENV=path: an environment with CUDA)"
	@echo "make docs    the documentation site, in build/site"
	@echo "make release all steps of a release up to the upload: checks, distributions in dist/, a trial in a new environment"
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

# Installs nothing: torch with CUDA must be there. Without an environment, `python3` is used.
gpu:
	$(if $(wildcard $(py)),$(py),$(PYTHON)) -m benchmarks.gpu $(ARGS)

# Pages can be opened as files, without a network. Always a full build, because an incremental build may lose search words.
docs: $(VENV)/.fsdp-docs
	$(py) -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs build/site
	@echo "built: build/site/index.html"

# Uploads nothing: the last line that it prints is the command for the upload.
release: $(VENV)/.fsdp-test
	$(py) .ci/release.py

clean:
	rm -rf runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

# A stamp file for each extra, rebuilt if its packages may have changed, so that a second call starts immediately.
$(VENV)/.fsdp-%: $(VENV)/pyvenv.cfg setup.py $(CONSTRAINTS)
	$(py) -m pip --version >/dev/null 2>&1 || $(py) -m ensurepip
	$(install) -e ".[$*]"
	@touch $@

# In a single installation. Tests without their package are skipped, so if the index lacks a package, the other packages
# are installed separately.
$(VENV)/.fsdp-clients: $(VENV)/.fsdp-test
	$(install) -e ".[$(subst $() ,$(comma),$(clients))]" || for extra in $(clients); do \
		$(install) -e ".[$$extra]" || echo "$$extra could not be installed: the tests that need it are skipped"; done
	@touch $@

# The last Lightning version with a strategy for FairScale, in a folder that only its tests use. It imports pkg_resources,
# which newer setuptools do not contain.
$(VENV)/.fsdp-lightning-1.9: $(VENV)/.fsdp-clients
	$(py) -m pip install --no-deps --target $(VENV)/lightning-1.9 --upgrade pytorch_lightning==1.9.5 "setuptools<81" \
		|| echo "Lightning 1.9 could not be installed: the tests that need it are skipped"
	@touch $@
