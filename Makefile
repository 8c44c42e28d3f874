# make demo         train a small model in each precision, see the table and the plot
# make test         all checks and tests, as on every push; nbdev_test among them, and pyright
# make test-latest  what uses fastai: notebooks and tests with today's newest packages, without nbdev
# make test-oldest  the same, and loops by hand, with the oldest PyTorch that settings.ini promises
# make readme       README.md from index.ipynb
# make notebooks    run every notebook and keep the outputs
# make lint types   the quick checks; pyright
# make clean        take away the environments and what was built

PYTHON ?= python3
DATA ?= photos
WORKERS ?= 2
TODAY := $(shell date +%F)
INSTALL_FROM := settings.ini setup.py

# The oldest PyTorch that is promised: 2.10 where settings.ini says torch>=2.10.
OLDEST := $(shell sed -n 's/^requirements *=.*torch>=\([0-9.]*\).*/\1/p' settings.ini)

NOTEBOOKS := index.ipynb $(wildcard nbs/*.ipynb nbs/engine/*.ipynb nbs/tutorials/*.ipynb)
# The first lesson takes minutes: it is run once, by make test.
LESSON := nbs/tutorials/01_mixed_precision_on_cifar10.ipynb
QUICK_NOTEBOOKS := $(filter-out $(LESSON),$(NOTEBOOKS))
# fastai differs between .venv and .venv-latest: what leaves it alone is run in the first one.
WITH_FASTAI := grep -lE '(import|from) (tiny|fastai|mixedfp[.](all|callback|checkpoint|examples|compare))'
# What sees most of another PyTorch, beside those: optimizers, masters, loops by hand.
OF_TORCH := $(addprefix tests/test_,optimizer.py master.py faults_loops.py)

.PHONY: demo test test-latest test-oldest readme notebooks lint types clean

# A shell of our own choice: make then looks for programs on the path set here, in every version.
SHELL := /bin/bash
demo test readme notebooks lint types: export PATH := $(CURDIR)/.venv/bin:$(PATH)
test-latest: export PATH := $(CURDIR)/.venv-latest/bin:$(PATH)
test-oldest: export PATH := $(CURDIR)/.venv-oldest/bin:$(PATH)

# The developing environment can do all that the user's can.
demo: $(if $(wildcard .venv/.dev),.venv/.dev,.venv/.user)
	mixedfp_compare --data $(DATA)

test: .venv/.dev
	python tools/unchanged.py nbdev_export
	python tools/unchanged.py nbdev_clean
	python tools/unchanged.py nbdev_clean --fname index.ipynb
	python tools/readme.py --check
	$(MAKE) --no-print-directory lint types
	python tools/run_notebooks.py --nbdev --workers $(WORKERS)
	pytest -q -n $(WORKERS) tests --callback-table=check

lint: .venv/.dev
	ruff check nbs mixedfp index.ipynb tests tools
	python tools/check_layers.py
	python tools/check_tests.py

types: .venv/.dev
	pyright

test-latest: .venv-latest/.installed-$(TODAY)
	python tools/run_notebooks.py --workers $(WORKERS) $$($(WITH_FASTAI) $(QUICK_NOTEBOOKS))
	pytest -q -n $(WORKERS) $$($(WITH_FASTAI) tests/test_*.py) --callback-table=check

test-oldest: .venv-oldest/.installed
	python tools/run_notebooks.py --workers $(WORKERS) $$($(WITH_FASTAI) $(QUICK_NOTEBOOKS))
	pytest -q -n $(WORKERS) $$($(WITH_FASTAI) tests/test_*.py) $(OF_TORCH) --callback-table=check

readme: .venv/.dev
	python tools/readme.py

notebooks: .venv/.dev
	python tools/run_notebooks.py --write
	nbdev_clean
	nbdev_clean --fname index.ipynb

clean:
	rm -rf .venv .venv-latest .venv-oldest build dist *.egg-info _proc _docs .pytest_cache .ruff_cache .hypothesis

# What runs tests and notebooks where there is no nbdev.
TESTERS := pytest pytest-xdist hypothesis nbconvert ipykernel nbformat

# A stamp in each environment says what was installed, so that the second time is quick.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv-latest/bin/python:
	$(PYTHON) -m venv .venv-latest

.venv-oldest/bin/python:
	$(PYTHON) -m venv .venv-oldest

.venv/.user: $(INSTALL_FROM) | .venv/bin/python
	@echo "installing mixedfp into .venv: a few minutes the first time"
	.venv/bin/python -m pip install -qq -e .
	@touch $@

.venv/.dev: $(INSTALL_FROM) | .venv/bin/python
	@echo "installing mixedfp and its development tools into .venv: a few minutes the first time"
	.venv/bin/python -m pip install -qq -e '.[dev]'
	@touch $@

.venv-latest/.installed-$(TODAY): $(INSTALL_FROM) | .venv-latest/bin/python
	@echo "installing today's newest packages into .venv-latest: a few minutes the first time"
	.venv-latest/bin/python -m pip install -qq -U --upgrade-strategy eager -e '.[skorch]' $(TESTERS)
	@touch $@

# pip finds the torchvision that goes with it
.venv-oldest/.installed: $(INSTALL_FROM) | .venv-oldest/bin/python
	@echo "installing PyTorch $(OLDEST) into .venv-oldest: a few minutes the first time"
	.venv-oldest/bin/python -m pip install -qq -e '.[skorch]' 'torch==$(OLDEST).*' $(TESTERS)
	@touch $@
