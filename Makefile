# make demo         train a small model in each precision, see the table and the plot
# make test         all checks and tests, as on every push; nbdev_test among them, and pyright
# make test-cuda    what can be seen of a GPU without one, on a simulated one
# make test-latest  what another fastai or torch can break, with today's newest, without nbdev
# make test-oldest  the same with the oldest PyTorch that settings.ini promises
# make test-gpu     on a machine with a GPU: tests of CUDA, and of learners whose data is there
# make bench-gpu    on a machine with a GPU: 10 minutes, one JSON, a table to post
# make readme       README.md from index.ipynb
# make docs         the site, in _docs: lessons, pages of the modules, API reference
# make test-docs    the same, and a look at every page in Chromium, where there is one
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

# make test runs everything. The other two environments run what another fastai or torch can break:
# what calls theirs, stands in for it, records it or reads its files, once each. Left out are laws
# of our own code alone (flat against each, 16 bits against 32, a precision's file in another) in
# all settings: the operations under them are in what is run. Every fault that was found is tried.
part = $(foreach name,$(2),tests/test_$(strip $(1)).py::test_$(name))
whole = $(foreach name,$(1),$(wildcard tests/test_$(name).py))
# fastai: its events and callbacks, its optimizers and files, its ways to train, its applications
OF_FASTAI := $(call whole,fastai_callbacks resume bad_input examples defects faults_* overflow_learner) \
  $(call part,report,a_fit_goes_on_as_if_nobody_had_looked columns_of_the_recorder) \
  $(call part,remainders,a_learner_has_the_bits_of_32_bit_masters) \
  $(call part,exactness,float32_is_plain_fastai layerwise_optimizers_are_plain_fastai) \
  $(call part,workflows,float32_is_plain_fastai a_search_for_a_rate_leaves_no_trace) \
  $(call part,hard_models,float32_is_plain_fastai a_copy_trains_on) \
  $(call part,applications,in_32_bits_it_is_plain_fastai_bit_for_bit \
    files_go_from_precision_to_precision) \
  $(call part,callback,what_callbacks_see outputs_keep_their_type an_exception_in_any_event \
    an_interruption_inside cancelled_batches export_and_load predicting_within_a_fit) \
  $(call part,compare,command_trains_prints_and_writes compare_leaves_global_torch_settings_alone) \
  $(call part,checkpoints,plain_fastai_reads_the_file a_file_of_plain_fastai_is_read \
    loading_in_any_event_is_plain_fastais a_refused_file_changes_nothing) \
  'tests/test_random_programs.py::test_with_fastai[0]'
# torch: private names, the inner operations of its optimizers, its GradScaler, autograd's hooks,
# its schedules, compiled steps, loops by hand, files; what processes share; dispatch modes; skorch
OF_TORCH := $(call whole,torch_private scaler_canary state_machine onepass scaler scaler_edges dcp \
    sharded) \
  $(call part,overflow,a_scale_that_is_too_large the_loss nothing_is_changed) \
  $(call part,remainders,the_bits_of_plain_32_bit_masters) \
  $(call part,optimizer,every_optimizer_of_torch_is_here 32_bits_are_the_plain_loop_bit_for_bit \
    flat_vectors_in_32_bits_are_the_plain_loop_bit_for_bit \
    16_bits_are_masters_kept_by_hand_bit_for_bit every_schedule_of_torch_is_here \
    a_schedule_moves_the_rate_as_of_the_plain_optimizer \
    a_closure_is_the_plain_loop_and_its_loss_comes_back \
    a_compiled_model_trains_as_an_eager_one a_compiled_function_may_hold_the_whole_step \
    checkpointed_activations_give_the_same_bits \
    a_copy_trains_on_to_the_same_bits_and_leaves_the_original_alone \
    a_run_that_goes_on_from_its_file_ends_in_the_same_bits) \
  $(call part,flat,element_wise_optimizers_are_told) \
  $(call part,amp_patterns,the_state_goes_to_pytorchs_scaler_and_back \
    pytorchs_own_scaler_over_masters_gives_our_bits a_wrong_order_gets_pytorchs_own_error) \
  $(call part,skorch,each_kind_of_net_trains_and_predicts autocast_is_pytorchs_loop_bit_for_bit \
    masters_are_with_masters_bit_for_bit a_resumed_run_ends_in_the_same_bits) \
  'tests/test_random_programs.py::test_by_hand[0]'
# pages that call fastai, and the engine's that look into torch's optimizers
ELSEWHERE := index.ipynb $(addprefix nbs/,10_callback.ipynb 12_skorch.ipynb 13_checkpoint.ipynb \
  20_examples.ipynb 30_all.ipynb engine/08_forward.ipynb engine/10_recorder.ipynb \
  engine/11_optim_access.ipynb engine/12_onepass.ipynb engine/13_elementwise.ipynb)
# What runs on the simulated GPU: learners whose data is there, then plain loops, then the CPU of a
# machine with a GPU that nobody asked for. Of each a part, always the same. Left out is what it has
# not (fused LSTMs, sparse memory, complex kernels, cuSOLVER), what fastai does with another default
# device, and tests of what a CPU alone does, or of sizes: vectors have gaps on a GPU.
LEARNERS_ON_CUDA := $(call part,exactness,float32_is_plain_fastai) \
  $(call part,flat,flat_is_each_in_float16) \
  $(call part,skip,training_goes_on_as_if_the_batch_had_not_been \
    a_hopeless_fit_of_its_own_callback_leaves_32_bits) \
  $(call part,callback,looking_changes_no_bit an_interruption_inside cancelled_batches \
    what_callbacks_see from_one_precision_to_another predicting_within_a_fit) \
  $(call part,checkpoints,loading_in_any_event_loads_every_bit plain_fastai_reads_the_file \
    files_of_parts_hold_those_parts_alone a_file_of_plain_fastai_is_read \
    the_best_is_saved_and_loaded_at_the_end) \
  $(call part,fastai_callbacks,float32_is_plain_fastai) \
  $(call part,workflows,float32_is_plain_fastai) \
  $(call whole,layer_scales)
NOT_ON_CUDA := not (sparse or complex or orthogonal or capturable or autocast_around \
  or small_steps or hold_float32_masters or learners or set_by_hand)
LOOPS_ON_CUDA := $(call whole,optimizer amp_patterns master faults_loops)
BESIDE_CUDA := $(call whole,scaler skip layer_scales optimizer skorch callback)
# A worker that is done takes what another one has not begun: files stay together until then, and
# what the tests of a file share is made once.
IN_TURN := pytest -q -n $(WORKERS) --dist worksteal
PYTEST := $(IN_TURN) --tables=check
ON_CUDA := PYTHONPATH=tests $(IN_TURN) -p simulated_cuda.plugin

.PHONY: demo test test-latest test-oldest test-cuda test-gpu test-docs bench-gpu readme docs notebooks \
  lint types clean

# A shell of our own choice: make then looks for programs on the path set here, in every version.
SHELL := /bin/bash
demo test test-cuda test-gpu bench-gpu readme notebooks lint types: export PATH := $(CURDIR)/.venv/bin:$(PATH)
test-latest: export PATH := $(CURDIR)/.venv-latest/bin:$(PATH)
test-oldest: export PATH := $(CURDIR)/.venv-oldest/bin:$(PATH)
docs test-docs: export PATH := $(CURDIR)/.venv-docs/bin:$(PATH)
docs: export NO_MKDOCS_2_WARNING := 1

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
	$(PYTEST) tests

lint: .venv/.dev
	ruff check nbs mixedfp index.ipynb tests tools docs bench
	python tools/check_layers.py
	python tools/check_tests.py
	python tools/check_words.py
	python tools/figures.py

types: .venv/.dev
	pyright

test-cuda: .venv/.dev
	$(ON_CUDA) $(call whole,cuda_budgets devices) \
	  tests/test_onepass_cuda.py -k 'not compiled_pass_is_within'
	$(ON_CUDA) --learners-on-cuda --one-in 20 $(LEARNERS_ON_CUDA) -k 'not RNN'
	$(ON_CUDA) --default-cuda --one-in 16 $(LOOPS_ON_CUDA) -k '$(NOT_ON_CUDA)'
	$(ON_CUDA) --one-in 25 $(BESIDE_CUDA)

test-latest: .venv-latest/.installed-$(TODAY)
	python tools/run_notebooks.py --workers $(WORKERS) $(ELSEWHERE)
	$(PYTEST) $(OF_FASTAI) $(OF_TORCH)

test-oldest: .venv-oldest/.installed
	python tools/run_notebooks.py --workers $(WORKERS) $(ELSEWHERE)
	$(PYTEST) $(OF_FASTAI) $(OF_TORCH)

# on a real one; the learners are those of test-cuda, all of them
test-gpu: .venv/.dev
	@python -c "import sys, torch; torch.cuda.is_available() or \
	  sys.exit('no test was run: PyTorch finds no CUDA device here')"
	MIXEDFP_TEST_DEVICE=cuda $(IN_TURN) $(call whole,onepass_cuda devices) $(LEARNERS_ON_CUDA)

bench-gpu: .venv/.dev
	python bench/gpu.py

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
