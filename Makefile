# Entry points. `make` alone lists them. A target runs in the image (RUNTIME=docker) or in .venv (RUNTIME=host);
# either is made first if need be.
SHELL := bash
.DEFAULT_GOAL := help
.SUFFIXES:
MAKEFLAGS += --no-print-directory --no-builtin-rules

RECIPE ?=
PRESET ?= auto
RUNTIME ?= auto
NGPU ?=
FRESH ?=
ARGS ?=
NAME ?=
FROM ?=
RUN ?=
FLASH_ATTN ?=
PUSH ?=
ENGINE ?= docker

PYTHON ?=
export RECIPE PRESET NGPU FRESH ARGS RUN PYTHON FLASH_ATTN PUSH ENGINE

recipes := $(filter-out _%,$(notdir $(patsubst %/launch.sh,%,$(wildcard recipes/*/launch.sh))))
bin := .venv/bin

ifneq ($(filter prep train inspect verify expected $(if $(RUN),,export report reproduce),$(MAKECMDGOALS)),)
ifneq ($(words $(filter $(recipes),$(RECIPE))),1)
$(error RECIPE=$(RECIPE): give the name of one recipe: $(recipes))
endif
endif

# Targets that run in either place. Inside the image they run as on a host whose environment is there.
in_image := prep train test lint export inspect verify report reproduce doctor expected
ifneq ($(filter setup $(in_image),$(MAKECMDGOALS)),)
runtime := $(if $(LMMS_IMAGE_BASE),host,$(shell ENGINE="$(ENGINE)" tools/runtime.sh "$(RUNTIME)"))
$(if $(filter-out docker host,$(runtime)),$(error $(runtime)))
endif

# The run folder that export and report look at: RUN=, or the recipe's newest one.
newest = $(firstword $(shell ls -td runs/$(RECIPE)-full runs/$(RECIPE)-smoke 2>/dev/null) runs/$(RECIPE)-smoke)
run_folder = $(if $(RUN),$(RUN),$(if $(filter smoke full,$(PRESET)),runs/$(RECIPE)-$(PRESET),$(newest)))
# Unset what would let another environment's packages in.
enter := unset PYTHONHOME VIRTUAL_ENV; export PATH="$(CURDIR)/$(bin):$$PATH"; set -f;

.PHONY: help setup prep train test lint export inspect verify report reproduce doctor new-recipe expected build shell image-check

help: ## list the targets and their options
	@echo "usage: make <target> [OPTION=value ...]"
	@echo
	@grep -hE '^[a-z][a-z-]*:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 16
	@echo
	@echo "  recipes:      $(recipes)"
	@echo "  RECIPE=       the recipe's folder name       PRESET=smoke|full   default: what this machine can run;"
	@echo "                                               inspect, verify: smoke"
	@echo "  NGPU=         processes on this node         FRESH=1             move the old run folder aside first"
	@echo "  RUN=          a run folder (export, report, reproduce)  default: the recipe's newest one"
	@echo "  ARGS=\"...\"    passed on, e.g. ARGS=\"trainer_args.max_steps=20\" (train), ARGS=\"--json\" (inspect)"
	@echo "  RUNTIME=docker|host  default: docker if an engine answers and supports the GPU that is there, else host"
	@echo "  FLASH_ATTN=1  an image with flash-attn       PUSH=<registry>/<name>  push the image (build)"

build: ## build the image if the lock or the Dockerfile changed (FLASH_ATTN=1, PUSH=)
	@tools/image.sh build

shell: ## a shell in the image
	@tools/image.sh run bash

image-check: setup ## build the image on a stand-in base and run it, with no engine at hand; root, half an hour
	@tools/image_check.sh

ifeq ($(runtime),docker)
$(in_image):
	@tools/image.sh run make $@

setup: build
else

setup: ## make .venv from requirements.lock, or the image, if it is missing or stale
	@$(if $(LMMS_IMAGE_BASE),,tools/setup.sh)

prep: setup ## prepare what a recipe needs (RECIPE=; ARGS= are prepare.py's options)
	@$(enter) python recipes/$(RECIPE)/prepare.py $(if $(findstring --overwrite,$(ARGS)),,--if-missing) $(ARGS)

train: setup ## train a recipe (RECIPE=, PRESET=, NGPU=, FRESH=1, ARGS=)
	@$(enter) exec recipes/$(RECIPE)/launch.sh $(ARGS)

test: setup ## run the whole test suite (ARGS= are pytest's options)
	@$(enter) python -m pytest -n 2 --dist loadgroup $(ARGS)

lint: setup ## check Python and shell code and the Dockerfile
	@$(enter) ruff check . && shellcheck tools/*.sh .ci/run $$(git ls-files 'recipes/*.sh' 'recipes/*.sbatch') && hadolint Dockerfile

export: setup ## write the newest checkpoint of a run as a Hugging Face folder (RECIPE= or RUN=)
	@$(enter) lmms-engine export "$(run_folder)" $(ARGS)

inspect: setup ## show the batches that a recipe would train on (RECIPE=, PRESET=)
	@$(enter) python recipes/$(RECIPE)/prepare.py --if-missing >&2 && lmms-engine inspect \
	  --config recipes/$(RECIPE)/config.yaml $(if $(filter full,$(PRESET)),,--config recipes/$(RECIPE)/smoke.yaml) \
	  $(ARGS)

# The recipe's own certificate is written by a whole, passing comparison of its smoke preset.
verify: setup ## compare every layout of a recipe with one plain process (RECIPE=, PRESET=)
	@$(enter) python recipes/$(RECIPE)/prepare.py --if-missing && lmms-engine verify \
	  --config recipes/$(RECIPE)/config.yaml $(if $(filter full,$(PRESET)),,--config recipes/$(RECIPE)/smoke.yaml) \
	  --out runs/$(RECIPE)-verify $(ARGS)
	@$(if $(filter full,$(PRESET))$(ARGS),,for form in md json; do \
	  cp runs/$(RECIPE)-verify/verify.$$form recipes/$(RECIPE)/certificate.$$form; done)

report: setup ## write report.html of a run (RECIPE= or RUN=)
	@$(enter) lmms-engine report "$(run_folder)" $(ARGS)

reproduce: setup ## run a run again and compare the curves step by step (RUN= or RECIPE=, ARGS="--anyway")
	@$(enter) lmms-engine reproduce "$(run_folder)" $(ARGS)

doctor: setup ## check this machine and say what to do (ARGS="--json")
	@$(enter) lmms-engine doctor $(ARGS)

expected: setup ## run a recipe's smoke preset and record its expected.json (RECIPE=)
	@$(enter) python tools/expected.py $(RECIPE)
endif

new-recipe: ## copy a recipe under another name (NAME=, FROM=)
	@tools/new_recipe.sh "$(NAME)" "$(FROM)"
