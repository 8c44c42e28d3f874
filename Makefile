# make demo         in 2 minutes: train a small model in each precision, show the table and the plot
# make test         all checks and tests, as on every push, including nbdev_test and pyright
# make test-all     the laws on all rows of their tables: nightly
# make test-cuda    GPU tests on a simulated GPU
# make test-latest  tests sensitive to fastai or torch versions, with today's newest, without nbdev
# make test-oldest  the same with the oldest PyTorch that settings.ini allows
# make test-gpu     on a machine with a GPU: the laws on CUDA, and GPU-only features
# make bench-gpu    on a machine with a GPU: 9 minutes, one JSON, tables to post
#                   both with the installed Python, offline, without installing anything: ENV=
# make readme       README.md from index.ipynb
# make docs         the site, in _docs: lessons, pages of the modules, API reference
# make test-docs    the same, and check every page in Chromium, if it is installed
# make notebooks    run every notebook and save the outputs
# make lint types   the quick checks; pyright
# make clean        remove the environments and build outputs

PYTHON ?= python3
# The environment of the GPU targets. `ENV=` uses the installed Python, and installs nothing.
ENV ?= .venv
DATA ?= photos
WORKERS ?= 2
TODAY := $(shell date +%F)
INSTALL_FROM := settings.ini setup.py

# The oldest supported PyTorch: 2.10 if settings.ini has torch>=2.10.
OLDEST := $(shell sed -n 's/^requirements *=.*torch>=\([0-9.]*\).*/\1/p' settings.ini)

# The other environments run tests sensitive to fastai or torch versions, on the laws' short tables.
PAGES_ELSEWHERE := index.ipynb $(addprefix nbs/,08_step.ipynb 10_callback.ipynb 13_skorch.ipynb \
  14_checkpoint.ipynb 03a_torch_private.ipynb)
TESTS_ELSEWHERE := $(addprefix tests/test_,torch_private.py scaler.py laws.py imports.py skorch.py compiled.py \
  engines.py)
# On the simulated GPU: tests of a GPU, and counts of launches and bytes.
ON_CUDA := pytest -q -n $(WORKERS) --dist worksteal -p simulated_cuda.plugin
# A worker that is done takes tests that another has not started.
PYTEST := pytest -q -n $(WORKERS) --dist worksteal
# After 15 silent seconds a line shows which command still runs, and for how long.
PATIENTLY := $(PYTHON) tools/patiently.py

.PHONY: demo test test-all test-latest test-oldest test-cuda test-skorch test-gpu test-docs bench-gpu readme docs notebooks \
  lint types clean

# Setting the shell makes every version of make look for programs on the path set here.
SHELL := /bin/bash
demo test test-all test-cuda test-skorch readme notebooks lint types: export PATH := $(CURDIR)/.venv/bin:$(PATH)
test-latest: export PATH := $(CURDIR)/.venv-latest/bin:$(PATH)
test-oldest: export PATH := $(CURDIR)/.venv-oldest/bin:$(PATH)
docs test-docs: export PATH := $(CURDIR)/.venv-docs/bin:$(PATH)
docs: export NO_MKDOCS_2_WARNING := 1

# The development environment includes everything in the user's.
demo: $(if $(wildcard .venv/.dev),.venv/.dev,.venv/.user)
	mixedfp_compare --data $(DATA)

test: .venv/.dev
	@echo "12 to 16 minutes on two cores: checks 1, notebooks 4 to 5, tests 7 to 10"
	$(PATIENTLY) nbdev_export python tools/unchanged.py nbdev_export
	$(PATIENTLY) nbdev_clean python tools/unchanged.py nbdev_clean
	$(PATIENTLY) nbdev_clean python tools/unchanged.py nbdev_clean --fname index.ipynb
	python tools/readme.py --check
	$(MAKE) --no-print-directory lint types
	$(PATIENTLY) notebooks python tools/run_notebooks.py --nbdev --workers $(WORKERS)
	$(PATIENTLY) tests $(PYTEST) tests

test-all: .venv/.dev
	$(PATIENTLY) tests $(PYTEST) tests --all-rows

# skorch's own tests with our nets, without those that need its repository's files or names, or are flaky
test-skorch: .venv/.dev
	pip install -q flaky
	OMP_NUM_THREADS=1 PYTHONPATH=tests pytest -q -n $(WORKERS) -p mixed_skorch -o addopts= -W ignore --pyargs \
	  skorch.tests.test_net skorch.tests.test_classifier skorch.tests.test_regressor \
	  -k "not load_cuda and not test_pickle_load and not test_repr and not lbfgs"

lint: .venv/.dev
	ruff check nbs mixedfp index.ipynb tests tools docs bench
	python tools/check_layers.py
	python tools/size.py
	$(PATIENTLY) calls python -W ignore tools/calls.py
	python tools/check_tests.py
	python tools/check_words.py
	python tools/figures.py

types: .venv/.dev
	$(PATIENTLY) pyright pyright

test-cuda: .venv/.dev
	MIXEDFP_TEST_DEVICE=cuda PYTHONPATH=tests $(PATIENTLY) tests $(ON_CUDA) tests/test_gpu.py tests/test_traffic.py

test-latest: .venv-latest/.installed-$(TODAY)
	$(PATIENTLY) notebooks python tools/run_notebooks.py --workers $(WORKERS) $(PAGES_ELSEWHERE)
	$(PATIENTLY) tests $(PYTEST) $(TESTS_ELSEWHERE)

test-oldest: .venv-oldest/.installed
	$(PATIENTLY) notebooks python tools/run_notebooks.py --workers $(WORKERS) $(PAGES_ELSEWHERE)
	$(PATIENTLY) tests $(PYTEST) $(TESTS_ELSEWHERE)

# on a real GPU; tests that need a package that is not installed are skipped by name
GPU_PYTHON := $(if $(ENV),$(ENV)/bin/python,$(PYTHON))
test-gpu bench-gpu: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

test-gpu: $(if $(filter .venv,$(ENV)),.venv/.dev)
	$(GPU_PYTHON) bench/gpu.py --stages tests $(ARGS)

bench-gpu: $(if $(filter .venv,$(ENV)),.venv/.dev)
	$(GPU_PYTHON) bench/gpu.py $(ARGS)

readme: .venv/.dev
	python tools/readme.py

docs: .venv-docs/.installed
	$(PATIENTLY) pages python tools/pages.py
	$(PATIENTLY) mkdocs mkdocs build --quiet --config-file _proc/mkdocs.yml
	@echo "the site is _docs/index.html"

test-docs: docs
	$(PATIENTLY) tests pytest -q -rs -p no:cacheprovider docs

notebooks: .venv/.dev
	python tools/run_notebooks.py --write
	nbdev_clean
	nbdev_clean --fname index.ipynb

clean:
	rm -rf .venv .venv-latest .venv-oldest .venv-docs build dist *.egg-info _proc _docs .pytest_cache .ruff_cache .hypothesis

# Packages to run tests and notebooks without nbdev.
TESTERS := pytest pytest-xdist hypothesis nbconvert ipykernel nbformat

# Files are compiled when first imported: most of the 20,000 installed ones never are. They are kept
# then, or each of the hundreds of processes of the tests would compile them again.
unexport PYTHONDONTWRITEBYTECODE
PIP := -m pip install -qq --no-compile

# A stamp in each environment records the installation, so that the next run is quick.
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
	@$(PATIENTLY) installing .venv/bin/python $(PIP) -e .
	@touch $@

.venv/.dev: $(INSTALL_FROM) | .venv/bin/python
	@echo "installing mixedfp and its development tools into .venv: a few minutes the first time"
	@$(PATIENTLY) installing .venv/bin/python $(PIP) -e '.[dev]'
	@touch $@

.venv-latest/.installed-$(TODAY): $(INSTALL_FROM) | .venv-latest/bin/python
	@echo "installing today's newest packages into .venv-latest: a few minutes the first time"
	@$(PATIENTLY) installing .venv-latest/bin/python $(PIP) -U --upgrade-strategy eager -e '.[skorch]' $(TESTERS)
	@touch $@

# pip finds the matching torchvision
.venv-oldest/.installed: $(INSTALL_FROM) | .venv-oldest/bin/python
	@echo "installing PyTorch $(OLDEST) into .venv-oldest: a few minutes the first time"
	@$(PATIENTLY) installing .venv-oldest/bin/python $(PIP) -e '.[skorch]' 'torch==$(OLDEST).*' $(TESTERS)
	@touch $@

.venv-docs/.installed: docs/requirements.txt | .venv-docs/bin/python
	@echo "installing the site's build tools into .venv-docs: a minute the first time"
	@$(PATIENTLY) installing .venv-docs/bin/python $(PIP) -r docs/requirements.txt
	@touch $@
