# Each target makes its own virtual environment with only what it needs. A newcomer types `make demo` or `make test`.
#   PYTHON  which interpreter makes the environment (3.11 - 3.13)
#   SEED, STEPS, RUN, MODEL  options of `make demo`
#   ENGINE   what samples in `make demo`: auto, transformers, or vllm, which then gets an environment of its own (3 GB)
PYTHON ?= python3
SEED ?= 0
STEPS ?= 10
RUN ?= runs/demo
MODEL ?= smollm2-135m
ENGINE ?= auto

UNSLOTH := "unsloth==2026.10.9" "unsloth_zoo==2026.10.9"

export OMP_NUM_THREADS ?= 2
# uv does not read pip's variable; wheels that lie on the disk (a CPU torch, say) are found through either.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

DEMO := .venv-demo
DEV := .venv
NEXT := .venv-next
VLLM := .venv-vllm
VLLM_PYTHON := $(or $(ART_VLLM_PYTHON),$(CURDIR)/$(VLLM)/bin/python)
WANTED_VLLM := $(if $(ART_VLLM_PYTHON),,$(VLLM)/complete)
DEMO_VARIABLES := $(if $(filter vllm,$(ENGINE)),ART_VLLM_PYTHON=$(VLLM_PYTHON))
INSTALLER := $(if $(filter demo,$(MAKECMDGOALS)),$(DEMO),$(DEV))
.PHONY: install engines demo test test-quick test-next check bench clean

install: $(DEV)/.installed

# What the tests of the other engine and the other trainer need: vLLM in an environment of its own (3 GB; one that is named in
# ART_VLLM_PYTHON is taken instead), and Unsloth without what it would bring: a CPU needs none of it.
engines: $(DEV)/.unsloth $(WANTED_VLLM)

$(DEMO)/.installed: EXTRAS := mcp,local
$(DEV)/.installed: EXTRAS := all,dev
$(NEXT)/.installed: EXTRAS := mcp,local,langgraph,adk,judge,dev
CONSTRAINTS := constraints.txt
$(NEXT)/.installed: CONSTRAINTS := constraints-next.txt

%/.installed: pyproject.toml constraints.txt constraints-next.txt
	@echo "Installing into $*: art-plugins[$(EXTRAS)]."
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet uv
	$*/bin/python -m uv pip install --quiet --compile-bytecode --python $*/bin/python -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@

$(DEV)/.unsloth: $(DEV)/.installed
	$(DEV)/bin/python -m uv pip install --quiet --no-deps --python $(DEV)/bin/python $(UNSLOTH)
	@touch $@

$(VLLM)/complete: | $(INSTALLER)/.installed
	$(INSTALLER)/bin/art vllm install --folder $(VLLM)

demo: $(DEMO)/.installed $(if $(filter vllm,$(ENGINE)),$(WANTED_VLLM))
	$(DEMO_VARIABLES) $(DEMO)/bin/mcp-rl train --server examples/sql_agent/server.py --model $(MODEL) --steps $(STEPS) --seed $(SEED) \
	  --engine $(ENGINE) --output $(RUN) --num-scenarios 48 --held-out 0.25 --max-calls 1 --max-turns 3 --max-tokens 48 \
	  --lora-layers 15 --learning-rate 1e-3 --warmup-steps 4 --warmup-learning-rate 2e-3

test: $(DEV)/.installed engines
	ART_VLLM_PYTHON=$(VLLM_PYTHON) $(DEV)/bin/python -m pytest

test-quick: $(DEV)/.installed
	$(DEV)/bin/python -m pytest -m "not slow"

# Without CrewAI the newest MCP, FastMCP and OpenAI libraries fit together: the parts that touch them, on those.
test-next: $(NEXT)/.installed
	$(NEXT)/bin/python -m pytest -m "not slow" tests/core tests/mcp tests/integrations

check: $(DEV)/.installed
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy
	$(DEV)/bin/lint-imports

bench: $(DEV)/.installed
	$(DEV)/bin/python -m benchmarks.train_step
	$(DEV)/bin/python -m benchmarks.rollouts
	$(DEV)/bin/python -m benchmarks.capture
	$(DEV)/bin/python -m benchmarks.judge

clean:
	rm -rf $(DEV) $(DEMO) $(NEXT) $(VLLM) $(VLLM).lock .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
