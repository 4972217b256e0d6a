# Everything one does with this repository; `make help` lists it. Each target sets up what it needs, once, in $(VENV).
PYTHON ?= python3
VENV ?= .venv
# Tests run in this many processes: one per core, at most 8 (each takes about 1 GB).
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
PYTEST_FLAGS ?= -n $(JOBS) --dist loadfile
DEMO_FLAGS ?=
BENCH_FLAGS ?=

BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
CPP_SOURCES := $(shell find csrc tests \( -name '*.cc' -o -name '*.h' \) 2>/dev/null)
CMAKE_FILES := CMakeLists.txt $(shell find csrc tests -name CMakeLists.txt 2>/dev/null)
PYTHON_FOLDERS := jax_fa4 tests examples benchmarks docs
MYPY_PACKAGES := -p jax_fa4 -p examples -p benchmarks

# What the extension's build and the editable install need before them, since they run without build isolation.
BUILD_TOOLS := 'scikit-build-core>=0.10' 'nanobind>=2.4' 'jaxlib>=0.8' 'cmake>=3.20' ninja

.DEFAULT_GOAL := help
.PHONY: help demo test test-full bench docs lint format ext clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo-ready $(VENV)/.native-ready ## train a small language model on packed text; pictures in out/ (3 minutes)
	@$(BIN)/python -m examples.train_lm $(DEMO_FLAGS)

test: lint ext ## lint, then every test that needs no GPU and is not slow
	@echo "== tests ($(JOBS) processes)"
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) -m 'not slow and not gpu'

test-full: lint ext ## lint, then every test; those that need a GPU are skipped where there is none
	@echo "== all tests ($(JOBS) processes)"
	@$(BIN)/python -m pytest $(PYTEST_FLAGS)

bench: $(VENV)/.demo-ready $(VENV)/.native-ready ## the CPU benchmarks; JSON and pictures in out/
	@$(BIN)/python -m benchmarks.run $(BENCH_FLAGS)

docs: $(VENV)/.demo-ready ## write docs/reference.md from the docstrings
	@$(BIN)/python docs/build_reference.py

lint: $(VENV)/.test-ready ## ruff, mypy and clang-format, changing nothing
	@echo "== ruff, mypy, clang-format"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "'make format' puts the files named above in order"; exit 1; }
	@$(BIN)/mypy $(MYPY_PACKAGES)
	@$(if $(CPP_SOURCES),$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES))

format: $(VENV)/.test-ready ## format Python and C++ files in place
	@$(BIN)/ruff format --quiet .
	@$(if $(CPP_SOURCES),$(BIN)/clang-format -i $(CPP_SOURCES))

ext: $(VENV)/.native-ready $(VENV)/.emulator-ready ## build the native extension and the emulator into jax_fa4/

clean: ## remove builds, caches, pictures and .venv
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis .venv
	find jax_fa4 -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up, in steps that each leave a stamp, so that it is paid once.

$(VENV)/.tools-ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "jax_fa4 needs Python 3.11 or later; choose one with: make PYTHON=python3.12 ..."; exit 1; }
	@echo "== setting up $(VENV) ($$($(PYTHON) --version)); a few minutes, once"
	@$(PYTHON) -m venv $(VENV) || { echo "the venv module is missing (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "   build tools and jaxlib"
	@$(PIP) install $(BUILD_TOOLS)
	@touch $@

# The editable install only points at this folder (no CMake run inside it); the `ext` target builds the extension.
EDITABLE := install --no-build-isolation --config-settings wheel.cmake=false --config-settings wheel.py-api= \
	--config-settings editable.mode=inplace -e

$(VENV)/.demo-ready: $(VENV)/.tools-ready pyproject.toml
	@echo "   jax_fa4, JAX, Flax, Optax, Matplotlib"
	@$(PIP) $(EDITABLE) '.[demo]'
	@touch $@

$(VENV)/.test-ready: $(VENV)/.demo-ready
	@echo "   test tools and the kernel compiler nvidia-cutlass-dsl"
	@$(PIP) $(EDITABLE) '.[test,build]'
	@touch $@

CMAKE_BUILD := NINJA_STATUS="   [%f/%t] " cmake --build build/dev -j $(JOBS) --target

build/dev/build.ninja: $(VENV)/.tools-ready $(CMAKE_FILES)
	@echo "== compiling"
	@cmake -S . -B build/dev -G Ninja --log-level=WARNING -DFA4_BUILD_TESTS=OFF \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python >/dev/null
	@touch $@

$(VENV)/.native-ready: build/dev/build.ninja $(CPP_SOURCES)
	@$(CMAKE_BUILD) _native
	@touch $@

# All that is left: the emulator, which only tests need.
$(VENV)/.emulator-ready: $(VENV)/.native-ready
	@$(CMAKE_BUILD) all
	@touch $@
