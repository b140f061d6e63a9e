# Everything runs in a virtual environment of its own; constraints.txt pins torch for every install.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# With what tests and checks need; serving does not wait for it.
DEV_STAMP := $(VENV)/.installed-dev
INSTALL = $(PYTHON) tools/install.py $(VENV) $(if $(TORCH_INDEX),--torch_index $(TORCH_INDEX))
# A package index for PyTorch alone, such as PyTorch's index of CPU wheels.
TORCH_INDEX ?=
MODEL ?=
TP ?=
ARGS ?=
# An image to run in place of .venv, the port on this machine, and the server that bench measures.
IMAGE ?=
# podman will do, too.
DOCKER ?= docker
PORT ?=
HOST ?=
BENCH_TYPE ?=
# As the recipes print it. Models are kept in the cache of this machine, not in the container.
DOCKER_RUN = $(DOCKER) run --rm --init --gpus all --ipc host \
	--ulimit memlock=-1 --ulimit stack=67108864 \
	-p $(or $(PORT),8000):8000 -v $(HOME)/.cache:/root/.cache:rw -e HF_TOKEN

# What `docker` builds: its name, and what it hands to deploy/docker/Dockerfile where it is given.
BUILT = $(or $(IMAGE),tensorrt-llm-serve:latest)
TARBALL = $(subst :,-,$(notdir $(BUILT))).tar.gz
BUILD_ARGS := BASE_IMAGE TORCH_INDEX NCCL_VERSION EFA_VERSION AWS_OFI_NCCL GDRCOPY_VERSION

# A variable on the command line that the target does not read is an error, not ignored.
comma := ,
READ := PYTHON VENV TORCH_INDEX SHELL \
	$(if $(filter docker,$(MAKECMDGOALS)),$(BUILD_ARGS)) \
	$(if $(filter docker save,$(MAKECMDGOALS)),IMAGE DOCKER) \
	$(if $(filter serve,$(MAKECMDGOALS)),MODEL TP IMAGE PORT DOCKER) \
	$(if $(filter bench,$(MAKECMDGOALS)),HOST PORT BENCH_TYPE MODEL IMAGE) \
	$(if $(filter docker serve bench bench-engine test test-gpu test-recipes,$(MAKECMDGOALS)),ARGS)
UNREAD := $(strip $(foreach v,$(filter-out $(READ),$(.VARIABLES)),$(if $(findstring command line,$(origin $v)),$v)))
ifneq ($(UNREAD),)
$(error 'make $(MAKECMDGOALS)' does not read $(UNREAD); it reads $(strip $(filter-out SHELL,$(READ)))$(if $(filter ARGS,$(READ)),$(comma) and other options go into ARGS="--name value"))
endif

.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml compat/pyproject.toml constraints.txt
	@$(INSTALL)
	@touch $(STAMP)

$(DEV_STAMP): pyproject.toml compat/pyproject.toml constraints.txt
	@$(INSTALL) --dev
	@touch $(STAMP) $(DEV_STAMP)

setup: $(DEV_STAMP)  ## create the virtual environment and install, with what tests need

serve: $(if $(IMAGE),,$(STAMP))  ## serve MODEL (default: smollm2, fetched once) on TP GPUs, at PORT (8000); in a container of IMAGE
ifeq ($(IMAGE),)
	$(BIN)/penstock serve $(MODEL) $(if $(TP),--tp_size $(TP)) $(if $(PORT),--port $(PORT)) $(ARGS)
else
	$(DOCKER_RUN) $(IMAGE) penstock serve $(MODEL) --host 0.0.0.0 $(if $(TP),--tp_size $(TP)) $(ARGS)
endif

docker:  ## build the image (IMAGE, default tensorrt-llm-serve:latest) with EFA_VERSION, GDRCOPY_VERSION, ... of the Dockerfile
	BUILDAH_FORMAT=docker $(DOCKER) build -f deploy/docker/Dockerfile -t $(BUILT) \
		--build-arg VERSION=$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) \
		--build-arg REVISION=$(shell git rev-parse HEAD 2>/dev/null || echo unknown) \
		$(foreach name,$(BUILD_ARGS),$(if $($(name)),--build-arg $(name)=$($(name)))) $(ARGS) .

save: SHELL := bash
save: .SHELLFLAGS := -o pipefail -ec
save:  ## write the image as a tarball for other machines: tensorrt-llm-serve-latest.tar.gz
	$(DOCKER) save $(BUILT) | gzip > $(TARBALL).part
	mv $(TARBALL).part $(TARBALL)

# A test that fails is tried once more and named in the summary: on a busy machine a time-out may be its own fault.
# Three workers on two cores: one of them often waits, for a server or a time-out.
test: $(DEV_STAMP)  ## run the whole test suite, on the CPU
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --reruns 1 -rR $(ARGS)

check: $(DEV_STAMP)  ## lint, formatting, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(DEV_STAMP)  ## format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-gpu:  ## kernel and engine checks on a CUDA machine, with the python that has torch (pytest tests/gpu: as tests)
	$(PYTHON) tests/gpu/all.py $(ARGS)

test-recipes:  ## the recipes' servers on a CUDA machine: whole models with random weights
	PYTHONPATH=src $(PYTHON) tests/gpu/recipes_check.py $(ARGS)

bench: $(if $(IMAGE),,$(STAMP))  ## measure the server at HOST (localhost) and PORT: bench.sh, BENCH_TYPE=throughput,prefill,...
	PATH="$(abspath $(BIN)):$$PATH" bash bench.sh $(if $(HOST),-H $(HOST)) $(if $(PORT),-p $(PORT)) \
		$(if $(BENCH_TYPE),--type $(BENCH_TYPE)) $(if $(MODEL),-m $(MODEL)) $(if $(IMAGE),-i $(IMAGE)) $(ARGS)

bench-engine:  ## engine speed on a CUDA machine: TPOT, 32 and 256 requests, start-up
	PYTHONPATH=src $(PYTHON) benchmarks/table.py $(ARGS)

docs: $(DEV_STAMP)  ## regenerate docs/config.md (the schema) and docs/performance.md (result files)
	$(BIN)/python tools/gen_config_docs.py
	$(BIN)/python benchmarks/report.py

wheel: $(STAMP)  ## build dist/*.whl: a pure wheel, and one with the native CPU ops compiled
	rm -rf build dist/penstock-*.whl
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	$(BIN)/python tools/platform_wheel.py dist/penstock-*-py3-none-any.whl

.PHONY: help setup serve docker save test check fmt test-gpu test-recipes bench bench-engine docs wheel
