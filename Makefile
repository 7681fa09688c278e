# Sets up .venv and runs commands in it: see `make help`.

PYTHON ?= python3
ARGS ?=

VENV := .venv
REQUIREMENTS := requirements/default.txt requirements/optimizers.txt requirements/ray.txt
RUN := $(VENV)/bin/python
PIP_INSTALL := $(RUN) -m pip install -qq --progress-bar off

# The caller's own Python and pip settings would change what is installed, imported and asserted.
unexport PYTHONHOME PYTHONPATH PYTHONSTARTUP PYTHONUSERBASE PYTHONOPTIMIZE PYTHONWARNINGS MYPYPATH
unexport VIRTUAL_ENV CONDA_PREFIX PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_REQUIRE_VIRTUALENV
export PIP_USER := 0
export PIP_NO_INPUT := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# "3.11 venv", "3.11" if Debian's python3-venv is missing, or empty.
PROBE := $(shell "$(PYTHON)" -E -c 'import sys; print("%d.%d" % sys.version_info[:2]); import ensurepip, venv; print("venv")' 2>/dev/null)
VERSION := $(firstword $(PROBE))
TOO_OLD := 2.% 3.0 3.1 3.2 3.3 3.4 3.5 3.6 3.7 3.8 3.9
NEEDS := nano_loop needs Python 3.10 or later with its venv module
ADVICE := or name another Python: make PYTHON=python3.12 $(or $(firstword $(MAKECMDGOALS)),test)
ifeq ($(VERSION),)
MISSING := $(NEEDS), and "$(PYTHON)" does not run here. Install Python 3.10 or later, $(ADVICE)
else ifneq ($(filter $(TOO_OLD),$(VERSION)),)
MISSING := $(NEEDS), and "$(PYTHON)" is Python $(VERSION). Install Python 3.10 or later, $(ADVICE)
else ifeq ($(filter venv,$(PROBE)),)
MISSING := $(NEEDS), and "$(PYTHON)" has no venv or ensurepip. Install them (on Debian and Ubuntu: apt install python$(VERSION)-venv), $(ADVICE)
endif

# A stamp is written when its step is complete, so that interrupted steps are repeated. Its name includes Python's
# version, so that another PYTHON gets its own set-up.
PINS := $(VENV)/pins-$(VERSION)
READY := $(VENV)/ready-$(VERSION)

# With two concurrent `make`, the second waits until the first has set up the same environment, or has finished writing
# next to the sources.
FLOCK := $(if $(shell command -v flock 2>/dev/null),flock)
LOCK := $(if $(FLOCK),flock $(firstword $(REQUIREMENTS)))
LOCK_OF_SOURCES := $(if $(FLOCK),flock Makefile)

# transformers requires Python 3.11.
PEERS := $(if $(filter 3.10,$(VERSION)),,requirements/bench.txt)

# Two workers, because tests that start a process mostly wait for it. `worksteal` keeps neighboring tests, which share
# fixtures, on one worker.
PYTEST := -m pytest -n 2 --dist worksteal
BENCHMARKS := tests/benchmarks
# A Ray cluster uses both cores, and is started once for all of its tests.
CLUSTERS := tests/clusters
# Libraries with their own trainers have two separate environments, one per torch version.
LIBRARIES := tests/libraries

# These do not depend on torch's version, so they are not repeated with IPEX's torch. Nor are slow tests of some others.
ANY_TORCH := $(CLUSTERS) $(LIBRARIES) tests/cli tests/cpu $(wildcard tests/distributed/launch*) tests/faults \
    tests/test_architecture.py tests/test_docstrings.py tests/test_no_test_skipped.py tests/config/test_options.py \
    tests/test_packaging.py tests/runtime/test_report.py tests/config/test_signatures.py tests/kernels/test_csrc.py \
    tests/loops/test_changes.py \
    $(filter-out %/test_cases.py,$(wildcard $(BENCHMARKS)/test_*.py))
SLOW_WITH_ANY_TORCH := transport or shared_memory or lightning or examples or scripts or verif

.PHONY: help demo test test-all test-benchmarks test-ray test-ipex test-libraries test-newest lint docs docs-serve docs-options docs-results planted-faults bench bench-overhead clean ready ready-ipex ready-jax test-arm wheel
.PHONY: test-libraries-2.13 test-libraries-2.8 proof proof-all proof-newest samples
.NOTPARALLEL:

help:
	@echo "make demo             train an example plain and accelerated, and compare their times"
	@echo "make test             run each behaviour once; with arguments for pytest: make test ARGS='-k precision'"
	@echo "make test-all         run every test, including slow ones and those of the benchmarks"
	@echo "make test-benchmarks  run the tests of the benchmarks"
	@echo "make test-ray         run the tests with a Ray cluster of two nodes on this host"
	@echo "make test-ipex        run the tests with IPEX 2.8 and torch 2.8, in .venv-ipex: a download of several GB"
	@echo "make test-libraries   run programs of other libraries, in two environments: a download of several GB"
	@echo "make test-newest      run tests of several processes with the wheel and the newest dependencies except torch"
	@echo "make test-arm         run a tenth of the tests on an emulated ARM, with its wheel: needs Debian and Linux 6.7"
	@echo "make proof            train samples of torch's databases and transformers' architectures, and compare with torch"
	@echo "make proof-newest     the same with the newest torch and transformers: a download of several GB"
	@echo "make proof-all        all samples in every mode, with each torch and the kernels of each level, for days; writes docs/exceptions.md"
	@echo "make planted-faults   plant each fault of tests/planted_faults.py, and check that tests find it"
	@echo "make lint             run ruff and mypy, and check that imports go downwards"
	@echo "make docs             build the documentation in site/; make docs-serve shows it while you write"
	@echo "make docs-options     write the table of docs/options.md from the declarations"
	@echo "make docs-results     write docs/results.md from the stored results"
	@echo "make bench            compare the speed with other systems, for hours: a check is make bench ARGS='--quick'"
	@echo "make bench-overhead   measure the overhead of nano_loop per call"
	@echo "make wheel            build the sdist and the wheels, without and with kernels in C, in dist/"
	@echo "make clean            remove the environments, builds and caches"
	@echo "Each sets up its environment first, with python3 or the Python that you name: make test PYTHON=python3.12"

# A separate environment with a third of the packages, unless the tests' environment exists.
DEMO_VENV := .venv-demo
demo:
	$(if $(MISSING),$(error $(MISSING)))
	@if test "$$(cat $(READY) 2>/dev/null)" = "$(CURDIR)"; then python=$(RUN); else \
	    $(MAKE) -s ready VENV=$(DEMO_VENV) REQUIREMENTS=requirements/demo.txt && python=$(DEMO_VENV)/bin/python; \
	fi && $$python examples/demo.py $(ARGS)

test: TESTS := -m "not slow" --ignore=$(BENCHMARKS) --ignore=$(CLUSTERS) --ignore=$(LIBRARIES)
test-benchmarks: TESTS := $(BENCHMARKS)
test-all: TESTS := --ignore=$(CLUSTERS) --ignore=$(LIBRARIES)
test-ray: TESTS := $(CLUSTERS)
test-ray: PYTEST := -m pytest
# Waiting threads should sleep on a busy machine: with spinning threads, two concurrent suites take ten times as long.
test test-all test-benchmarks test-ray: export OMP_WAIT_POLICY := passive
test test-all test-benchmarks test-ray: ready
	@$(RUN) $(PYTEST) $(TESTS) $(ARGS)

# A separate environment that includes the benchmarks' peers, so that tests and `make bench` find them.
# Its torch is built with CUDA, which must not be used.
WITH_IPEX = $(MAKE) --no-print-directory VENV=.venv-ipex REQUIREMENTS="requirements/ipex.txt $(PEERS)"
test-ipex: export CUDA_VISIBLE_DEVICES :=
test-ipex:
	@+$(WITH_IPEX) \
	    TESTS="$(addprefix --ignore=,$(ANY_TORCH)) -k 'not (slow and ($(SLOW_WITH_ANY_TORCH)))'" test-all

ready-ipex:
	@+$(WITH_IPEX) ready

test-libraries: test-libraries-2.13 test-libraries-2.8
test-libraries-2.13 test-libraries-2.8: export CUDA_VISIBLE_DEVICES :=
test-libraries-2.13 test-libraries-2.8: test-libraries-%:
	$(if $(MISSING),$(error $(MISSING)))
	$(if $(filter 3.10,$(VERSION)),$(error The libraries need Python 3.11 or later. Name one: make PYTHON=python3.12 $@))
	@+$(MAKE) --no-print-directory VENV=.venv-libraries-$* REQUIREMENTS=requirements/libraries-$*.txt TESTS=$(LIBRARIES) test-all

# Samples of other libraries as tests: a fixed share, or all of them with each version of torch, with two threads, and
# with the kernels of the other levels that this CPU supports.
SAMPLES = $(MAKE) --no-print-directory VENV=.venv-libraries-$(1) REQUIREMENTS=requirements/libraries-$(1).txt samples
OTHER_LEVELS = .venv-libraries-2.13/bin/python -c "from nano_loop.cpu import read_machine as machine; \
    from nano_loop.kernels.compiler import LEVELS; \
    print(*[level.name for level in LEVELS[1:] if level.instruction_sets <= machine().instruction_sets])"
proof proof-all proof-newest: export CUDA_VISIBLE_DEVICES :=
proof proof-all proof-newest: export HF_HUB_OFFLINE := 1
proof proof-all proof-newest: export OMP_WAIT_POLICY := passive
proof:
	@+$(call SAMPLES,2.13)
proof-all:
	@+$(call SAMPLES,2.13) ARGS="--all"
	@+$(call SAMPLES,2.13) ARGS="--all --processes 1 --threads 2"
	@+for level in $$($(OTHER_LEVELS)); do NANO_LOOP_KERNELS=$$level $(call SAMPLES,2.13) ARGS="--all --elsewhere" || exit 1; done
	@+$(call SAMPLES,2.8) ARGS="--all --elsewhere"
	@+$(MAKE) --no-print-directory proof-newest ARGS="--all --elsewhere"
samples: ready
	@$(RUN) $(PYTEST) -q tests/proof
	@PYTHONPATH=tests $(RUN) -m proof $(ARGS)

# Wheels of the current sources: outdated ones in dist are rebuilt.
WHEELS := dist/.made
$(WHEELS): $(shell find nano_loop -name "*.py" -o -name "*.[ch]" -o -name "*.json" 2>/dev/null) README.md setup.cfg setup.py
	@$(MAKE) --no-print-directory wheel

# The newest versions of all packages except those named: nothing pins them, so they are reinstalled each time. The tests
# are in a folder without the package's sources, which would be imported instead of the wheel.
NEWEST := .venv-newest
define set_up_newest
	$(if $(MISSING),$(error $(MISSING)))
	@"$(PYTHON)" -m venv --clear $(NEWEST)
	@$(NEWEST)/bin/python -m pip install -qq --progress-bar off $(1) \
	    "$$(ls dist/*_$$(uname -m).whl dist/*-none-any.whl 2>/dev/null | head -1)[cli]" hypothesis pytest pytest-timeout pytest-xdist
	@$(NEWEST)/bin/python -m pip freeze
	@rm -rf build/newest && mkdir -p build/newest && cp -r docs tests setup.cfg build/newest
endef

# With other versions: make test-newest PYTHON=python3.13 TORCH=2.12.1 TESTS="--one-of 10 tests/loops tests/kernels"
test-newest: TORCH = $(shell sed -n 's/^torch==//p' requirements/default.txt)
test-newest: TESTS := $(addprefix tests/distributed/,payload launch launch_local)
test-newest: export CUDA_VISIBLE_DEVICES :=
test-newest: export OMP_WAIT_POLICY := passive
test-newest: $(WHEELS)
	$(call set_up_newest,torch==$(TORCH))
	@cd build/newest && ../../$(NEWEST)/bin/$(subst -m,python -m,$(PYTEST)) -m "not slow" $(TESTS) $(ARGS)

# The samples, with the newest torch too, and optionally a share: make proof-newest ARGS="--share 1/60"
proof-newest: $(WHEELS)
	$(call set_up_newest,torch transformers expecttest)
	@cd build/newest && PYTHONPATH=tests ../../$(NEWEST)/bin/python -m proof $(ARGS)

# One test in ten, because emulated programs are tens of times slower. Timings are meaningless there.
ON_ARM = PYTHON=$(WHEEL_VENV)/bin/python scripts/emulated_arm.sh python3 $(PYTEST) -m "not slow" --one-of 10 \
    --timeout 600 -p no:cacheprovider
# All of these: functions in C that `test_exactness.py` does not call.
EXACT_ON_ARM := $(addprefix tests/kernels/,test_activations.py test_recurrence.py::test_any_sizes_are_right)
RANKS_ON_ARM := test_ranks.py data_parallel launch_local/test_run.py
test-arm: $(WHEELS)
	@$(LOCK) $(MAKE) -s VENV=$(WHEEL_VENV) REQUIREMENTS=requirements/wheel.txt $(WHEEL_VENV)/pins-$(VERSION)
	@$(ON_ARM) tests/loops tests/kernels/test_exactness.py $(addprefix tests/distributed/,$(RANKS_ON_ARM)) $(ARGS)
	@NANO_LOOP_KERNELS=neon $(ON_ARM) tests/kernels/test_exactness.py
	@for level in neon sve; do NANO_LOOP_KERNELS=$$level $(ON_ARM) --one-of 1 $(EXACT_ON_ARM) || exit 1; done

# The upper bound in the users' suite, for `make bench ARGS="--suite users"`.
ready-jax:
	@+$(MAKE) --no-print-directory VENV=.venv-jax REQUIREMENTS="requirements/default.txt requirements/jax.txt" ready

lint: ready
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy --strict nano_loop
	@$(RUN) -m pytest -q tests/test_architecture.py

planted-faults: ready
	@PYTHONPATH=tests $(RUN) -m planted_faults $(ARGS)

docs-options: ready
	@PYTHONPATH=tests $(RUN) -m test_readme

docs-results: ready
	@$(RUN) -m benchmarks.published benchmarks/results/2*.json --page docs/results.md

# The site reads the package's sources and only imports its command line, so its environment has no torch.
DOCS_VENV := .venv-docs
docs docs-serve:
	$(if $(MISSING),$(error $(MISSING)))
	@$(LOCK) $(MAKE) -s VENV=$(DOCS_VENV) REQUIREMENTS=requirements/docs.txt $(DOCS_VENV)/pins-$(VERSION)
	@$(MKDOCS)
docs: MKDOCS = $(DOCS_VENV)/bin/python -m mkdocs build --strict --quiet $(ARGS)
docs-serve: MKDOCS = $(DOCS_VENV)/bin/python -m mkdocs serve --livereload $(ARGS)
docs docs-serve: export NO_MKDOCS_2_WARNING := 1

# The peers have a separate environment, so that our code cannot come to depend on them.
BENCH_VENV := .venv-bench
bench:
	$(if $(MISSING),$(error $(MISSING)))
	$(if $(filter 3.10,$(VERSION)),$(error transformers needs Python 3.11 or later. Name one: make PYTHON=python3.12 bench))
	@$(MAKE) -s ready VENV=$(BENCH_VENV) REQUIREMENTS="requirements/default.txt $(PEERS)"
	@$(BENCH_VENV)/bin/python -m benchmarks.run $(ARGS)

bench-overhead: ready
	@$(RUN) -m benchmarks.overhead

# The sdist, and the wheels without and with C kernels: one version with two platform tags. auditwheel sets the second
# tag, by the C libraries that the wheel supports.
WHEEL_VENV := .venv-wheel
BACKEND = $(WHEEL_VENV)/bin/python -c "import sys, setuptools.build_meta as backend; getattr(backend, sys.argv[1])(sys.argv[2])"
AUDITWHEEL = PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH" auditwheel
# Runs a command, and shows its output only if it fails.
quietly = { $(1); } >$(WHEEL_VENV)/output 2>&1 || { cat $(WHEEL_VENV)/output >&2; exit 1; }
wheel:
	$(if $(MISSING),$(error $(MISSING)))
	@$(LOCK) $(MAKE) -s VENV=$(WHEEL_VENV) REQUIREMENTS=requirements/wheel.txt $(WHEEL_VENV)/pins-$(VERSION)
	@rm -rf build dist
	@mkdir dist
	@echo "1 of 4: the sdist"
	@$(call quietly,$(BACKEND) build_sdist dist)
	@echo "2 of 4: the wheel for every system, whose kernels in C are compiled at first use"
	@$(call quietly,NANO_LOOP_KERNELS=off $(BACKEND) build_wheel dist)
	@echo "3 of 4: the wheel with kernels in C, which pip prefers on Linux for x86-64: gcc compiles them for one to three minutes"
	@$(call quietly,$(BACKEND) build_wheel build/dist)
	@$(call quietly,$(AUDITWHEEL) repair --exclude libgomp.so.1 -w dist build/dist/*-linux_x86_64.whl)
	@echo "4 of 4: the same for Linux on ARM, by $(CROSS)gcc"
	@if command -v $(CROSS)gcc >/dev/null; then $(call quietly,$(MAKE_ARM_WHEEL)); else echo "It is not here: no such wheel"; fi
	@touch $(WHEELS)
	@ls -l dist

# The same for another processor, with a cross compiler and Python's name for the platform.
CROSS := aarch64-linux-gnu-
MAKE_ARM_WHEEL = CC=$(CROSS)gcc _PYTHON_HOST_PLATFORM=linux-aarch64 $(BACKEND) build_wheel build/dist && \
    $(AUDITWHEEL) repair -w dist build/dist/*-linux_aarch64.whl

# A checkout that was moved or copied together with .venv must not import the package from its old location.
ready:
	$(if $(MISSING),$(error $(MISSING)))
	@test "$$(cat $(READY) 2>/dev/null)" = "$(CURDIR)" || rm -f $(READY)
	@$(LOCK) $(MAKE) -s $(READY)

$(PINS): $(REQUIREMENTS)
	@echo "Setting up $(VENV) with Python $(VERSION): one to three minutes"
	@"$(PYTHON)" -m venv --clear $(VENV)
	@$(PIP_INSTALL) $(addprefix -r ,$(REQUIREMENTS))
	@touch $@

KERNELS := nano_loop/kernels
$(READY): $(PINS) setup.cfg setup.py scripts/compile_levels.py pyproject.toml nano_loop/version.py $(wildcard $(KERNELS)/compiler.py $(KERNELS)/csrc/*)
	@$(LOCK_OF_SOURCES) $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@broken=$$($(RUN) -m pip check) || { echo "$$broken" >&2; exit 1; }
	@ls $(KERNELS)/prebuilt >/dev/null 2>&1 || echo "No gcc was found: kernels in C are compiled at first use, if there is a compiler then"
	@printf '%s' "$(CURDIR)" > $@

clean:
	@rm -rf $(VENV) .venv-ipex .venv-jax .venv-libraries-* .venv-newest .arm $(DEMO_VENV) $(BENCH_VENV) $(WHEEL_VENV) $(DOCS_VENV) $(KERNELS)/prebuilt build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
