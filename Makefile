# Everything on a fresh machine: `make test`, `make demo`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := $(wildcard src/outrider/ops/cpu/*.cpp src/outrider/ops/cpu/*.h)
SANITIZED := build/_core_sanitized.so
EMULATED := build/emulated/_core_amx.so
COMPILE = $(CXX) -march=native -std=c++17 -ffp-contract=off -fPIC -shared -pthread -DOUTRIDER_SOURCES="\"$$(cat \
  $(sort $(wildcard src/outrider/ops/cpu/*.h) $(wildcard src/outrider/ops/cpu/*.cpp)) | sha256sum | cut -d' ' -f1)\"" src/outrider/ops/cpu/core.cpp

# Both workers begin with one half of the tests each, so that servers and models are made once; whoever is done first takes over.
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: test test-fast test-all check demo doctor oracles sanitize emulate arm notebooks packages dockerfile-steps docs clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml setup.py constraints.txt $(CORE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,train,serve]'
	touch $@

check: $(STAMP)
	$(BIN)/ruff check setup.py src tests recipes benchmarks
	$(BIN)/ruff format --check setup.py src tests recipes benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: check
	$(PYTEST)

# For the inner loop: no slow tests, each value of a grid once, few random examples.
test-fast: $(STAMP)
	$(PYTEST) --quick-grids

# Every combination of every grid of parameters, every example of random tests, and the exhaustive cases.
test-all: check
	$(PYTEST) --whole-grids

demo: $(STAMP)
	$(BIN)/outrider compare "$$(printf 'import json\nfrom pathlib import Path\n\n\ndef load_config(path: Path) -> dict:\n    ')"

# The native core's tests with AddressSanitizer and UndefinedBehaviorSanitizer, for this processor.
$(SANITIZED): setup.py $(CORE)
	mkdir -p $(@D)
	$(COMPILE) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -o $@

sanitize: $(STAMP) $(SANITIZED)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 OUTRIDER_CORE=$(CURDIR)/$(SANITIZED) $(BIN)/python -m pytest -n0 tests/ops/test_native.py tests/ops/test_native_calls.py tests/ops/test_groups.py tests/ops/test_columns.py tests/ops/test_blocks.py tests/ops/test_adapters.py tests/ops/test_scan.py tests/ops/test_int8_kv.py \
	  tests/model/test_features.py tests/model/test_experts.py tests/engine/test_same_windows.py tests/sampling/test_choice.py tests/draft/test_draft_model.py tests/draft/test_grown_trees.py \
	  tests/heads/test_block.py tests/draft/test_dflash.py

# The amx build with tiles in plain C++, for a processor with AVX-512 and none.
$(EMULATED): setup.py tests/ops/emulated_tiles.h $(CORE)
	mkdir -p $(@D)
	$(COMPILE) -O2 -include tests/ops/emulated_tiles.h -o $@

emulate: $(STAMP) $(EMULATED)
	OUTRIDER_CORE=$(CURDIR)/$(EMULATED) $(BIN)/python -m pytest -n0 tests/ops/test_native.py tests/ops/test_native_calls.py tests/ops/test_groups.py tests/ops/test_columns.py tests/ops/test_blocks.py tests/ops/test_adapters.py \
	  tests/model/test_features.py tests/model/test_experts.py

# The native core for ARM, cross-built, and its tests under qemu-user: about 15 minutes, and a download of 300 MB at first. Needs
# g++-aarch64-linux-gnu and qemu-user-static.
arm: $(STAMP)
	$(BIN)/python -m recipes.release arm

# The notebooks of examples/ from top to bottom; `make test` runs them too.
notebooks: $(STAMP)
	$(BIN)/python -m pytest -n0 tests/examples

# The sdist and the manylinux wheel in dist/, and the wheel in use where there is no compiler: about 4 minutes on two cores.
packages: $(STAMP)
	$(BIN)/python -m recipes.release wheel
	$(BIN)/python -m recipes.release check

# The Dockerfile's steps in order, without docker: about 3 minutes on two cores.
dockerfile-steps: $(STAMP)
	$(BIN)/python -m recipes.release dockerfile --target cpu

# Heads of the `speculators` package beside ours, in an environment of its own: the package pins other versions. torchvision, which
# it pulls in, may be built for another torch, and its models do not need it.
oracles: $(STAMP) build/oracles
	OUTRIDER_ORACLES=$(CURDIR)/build/oracles/bin/python $(BIN)/python -m pytest -n0 tests/oracles

build/oracles: constraints.txt
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check "$$(grep ^torch== constraints.txt)" speculators==0.9.0
	$@/bin/pip uninstall --quiet --yes torchvision torchaudio
	touch $@

# The documentation as a site in build/site; any warning is an error.
docs: build/docs-tools
	NO_MKDOCS_2_WARNING=1 build/docs-tools/bin/mkdocs build --quiet --strict

build/docs-tools: constraints.txt
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material
	touch $@

doctor: $(STAMP)
	$(BIN)/outrider doctor

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
