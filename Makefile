# make demo         train a small model in each precision, see the table and the plot
# make test         all checks and tests, as on every push; nbdev_test among them, and pyright
# make test-all     the laws on all rows of their tables: nightly
# make test-cuda    what can be seen of a GPU without one, on a simulated one
# make test-latest  what another fastai or torch can break, with today's newest, without nbdev
# make test-oldest  the same with the oldest PyTorch that settings.ini promises
# make test-gpu     on a machine with a GPU: the laws on CUDA, and what only a GPU has
# make bench-gpu    on a machine with a GPU: 9 minutes, one JSON, tables to post
#                   both with the Python at hand, offline, where nothing may be installed: ENV=
# make readme       README.md from index.ipynb
# make docs         the site, in _docs: lessons, pages of the modules, API reference
# make test-docs    the same, and a look at every page in Chromium, where there is one
# make notebooks    run every notebook and keep the outputs
# make lint types   the quick checks; pyright
# make clean        take away the environments and what was built

PYTHON ?= python3
# The environment of the GPU's targets. `ENV=` takes the Python at hand, and installs nothing.
ENV ?= .venv
DATA ?= photos
WORKERS ?= 2
TODAY := $(shell date +%F)
INSTALL_FROM := settings.ini setup.py

# The oldest PyTorch that is promised: 2.10 where settings.ini says torch>=2.10.
OLDEST := $(shell sed -n 's/^requirements *=.*torch>=\([0-9.]*\).*/\1/p' settings.ini)

# The other environments run what another fastai or torch can break, on the laws' short tables.
PAGES_ELSEWHERE := index.ipynb $(addprefix nbs/,08_step.ipynb 10_callback.ipynb 13_skorch.ipynb \
  14_checkpoint.ipynb 03a_torch_private.ipynb)
TESTS_ELSEWHERE := $(addprefix tests/test_,torch_private.py scaler.py laws.py imports.py skorch.py compiled.py \
  engines.py)
# On the simulated GPU: where models are moved, and one in so many of the laws.
ON_CUDA := PYTHONPATH=tests pytest -q -n $(WORKERS) --dist worksteal -p simulated_cuda.plugin
# A worker that is done takes what another one has not begun.
PYTEST := pytest -q -n $(WORKERS) --dist worksteal

.PHONY: demo test test-all test-latest test-oldest test-cuda test-skorch test-gpu test-docs bench-gpu readme docs notebooks \
  lint types clean

# A shell of our own choice: make then looks for programs on the path set here, in every version.
SHELL := /bin/bash
demo test test-all test-cuda test-skorch readme notebooks lint types: export PATH := $(CURDIR)/.venv/bin:$(PATH)
test-latest: export PATH := $(CURDIR)/.venv-latest/bin:$(PATH)
test-oldest: export PATH := $(CURDIR)/.venv-oldest/bin:$(PATH)
docs test-docs: export PATH := $(CURDIR)/.venv-docs/bin:$(PATH)
docs: export NO_MKDOCS_2_WARNING := 1

# The developing environment can do all that the user's can.
demo: $(if $(wildcard .venv/.dev),.venv/.dev,.venv/.user)
	mixedfp_compare --data $(DATA)

test: .venv/.dev
	@echo "12 to 16 minutes on two cores: checks 1, notebooks 4 to 5, tests 7 to 10"
	python tools/unchanged.py nbdev_export
	python tools/unchanged.py nbdev_clean
	python tools/unchanged.py nbdev_clean --fname index.ipynb
	python tools/readme.py --check
	$(MAKE) --no-print-directory lint types
	python tools/run_notebooks.py --nbdev --workers $(WORKERS)
	$(PYTEST) tests

test-all: .venv/.dev
	$(PYTEST) tests --all-rows

# skorch's own tests, whose nets are ours: left out is what needs files of its repository or its names, or fails by chance
test-skorch: .venv/.dev
	pip install -q flaky
	OMP_NUM_THREADS=1 PYTHONPATH=tests pytest -q -n $(WORKERS) -p mixed_skorch -o addopts= -W ignore --pyargs \
	  skorch.tests.test_net skorch.tests.test_classifier skorch.tests.test_regressor \
	  -k "not load_cuda and not test_pickle_load and not test_repr and not lbfgs"

lint: .venv/.dev
	ruff check nbs mixedfp index.ipynb tests tools docs bench
	python tools/check_layers.py
	python tools/size.py
	python -W ignore tools/calls.py
	python tools/check_tests.py
	python tools/check_words.py
	python tools/figures.py

types: .venv/.dev
	pyright

test-cuda: .venv/.dev
	MIXEDFP_TEST_DEVICE=cuda $(ON_CUDA) tests/test_gpu.py tests/test_traffic.py

test-latest: .venv-latest/.installed-$(TODAY)
	python tools/run_notebooks.py --workers $(WORKERS) $(PAGES_ELSEWHERE)
	$(PYTEST) $(TESTS_ELSEWHERE)

test-oldest: .venv-oldest/.installed
	python tools/run_notebooks.py --workers $(WORKERS) $(PAGES_ELSEWHERE)
	$(PYTEST) $(TESTS_ELSEWHERE)

# on a real one; what needs a package that is not installed there is skipped by name
GPU_PYTHON := $(if $(ENV),$(ENV)/bin/python,$(PYTHON))
test-gpu bench-gpu: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

test-gpu: $(if $(filter .venv,$(ENV)),.venv/.dev)
	$(GPU_PYTHON) bench/gpu.py --stages tests $(ARGS)

bench-gpu: $(if $(filter .venv,$(ENV)),.venv/.dev)
	$(GPU_PYTHON) bench/gpu.py $(ARGS)

readme: .venv/.dev
	python tools/readme.py

docs: .venv-docs/.installed
	python tools/pages.py
	mkdocs build --quiet --config-file _proc/mkdocs.yml
	@echo "the site is _docs/index.html"

test-docs: docs
	pytest -q -rs -p no:cacheprovider docs

notebooks: .venv/.dev
	python tools/run_notebooks.py --write
	nbdev_clean
	nbdev_clean --fname index.ipynb

clean:
	rm -rf .venv .venv-latest .venv-oldest .venv-docs build dist *.egg-info _proc _docs .pytest_cache .ruff_cache .hypothesis

# What runs tests and notebooks where there is no nbdev.
TESTERS := pytest pytest-xdist hypothesis nbconvert ipykernel nbformat

# A file is compiled when it is first imported: most of the 20,000 that are installed never are.
PIP := -m pip install -qq --no-compile

# A stamp in each environment says what was installed, so that the second time is quick.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv-latest/bin/python:
	$(PYTHON) -m venv .venv-latest

.venv-oldest/bin/python:
	$(PYTHON) -m venv .venv-oldest

.venv-docs/bin/python:
	$(PYTHON) -m venv .venv-docs

.venv/.user: $(INSTALL_FROM) | .venv/bin/python
	@echo "installing mixedfp into .venv: a few minutes the first time"
	.venv/bin/python $(PIP) -e .
	@touch $@

.venv/.dev: $(INSTALL_FROM) | .venv/bin/python
	@echo "installing mixedfp and its development tools into .venv: a few minutes the first time"
	.venv/bin/python $(PIP) -e '.[dev]'
	@touch $@

.venv-latest/.installed-$(TODAY): $(INSTALL_FROM) | .venv-latest/bin/python
	@echo "installing today's newest packages into .venv-latest: a few minutes the first time"
	.venv-latest/bin/python $(PIP) -U --upgrade-strategy eager -e '.[skorch]' $(TESTERS)
	@touch $@

# pip finds the torchvision that goes with it
.venv-oldest/.installed: $(INSTALL_FROM) | .venv-oldest/bin/python
	@echo "installing PyTorch $(OLDEST) into .venv-oldest: a few minutes the first time"
	.venv-oldest/bin/python $(PIP) -e '.[skorch]' 'torch==$(OLDEST).*' $(TESTERS)
	@touch $@

.venv-docs/.installed: docs/requirements.txt | .venv-docs/bin/python
	@echo "installing what builds the site into .venv-docs: a minute the first time"
	.venv-docs/bin/python $(PIP) -r docs/requirements.txt
	@touch $@
