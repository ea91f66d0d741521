# Each target makes its own virtual environment with only what it needs. A newcomer types `make demo` or `make test`.
#   PYTHON  which interpreter makes the environment (3.11 - 3.13)
#   SEED, STEPS, RUN, MODEL  options of `make demo`
PYTHON ?= python3
SEED ?= 0
STEPS ?= 10
RUN ?= runs/demo
MODEL ?= smollm2-135m

export OMP_NUM_THREADS ?= 2
# uv does not read pip's variable; wheels that lie on the disk (a CPU torch, say) are found through either.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

DEMO := .venv-demo
DEV := .venv
UV_INSTALL = $(1)/bin/python -m uv pip install --quiet --compile-bytecode --python $(1)/bin/python -c constraints.txt

.PHONY: install demo test test-quick check bench clean

install: $(DEV)/.installed

$(DEMO)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(DEMO): mcp-rl with the MCP client and the CPU trainer."
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet uv
	$(call UV_INSTALL,$(DEMO)) -e '.[mcp,local]'
	@touch $@

$(DEV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(DEV): all of the above and the development tools."
	$(PYTHON) -m venv $(DEV)
	$(DEV)/bin/python -m pip install --quiet uv
	$(call UV_INSTALL,$(DEV)) -e '.[all,dev]'
	@touch $@

demo: $(DEMO)/.installed
	$(DEMO)/bin/mcp-rl train --server examples/sql_agent/server.py --model $(MODEL) --steps $(STEPS) --seed $(SEED) \
	  --output $(RUN) --num-scenarios 36 --max-calls 2 --max-turns 3 --max-tokens 48 \
	  --lora-layers 15 --learning-rate 1e-3 --warmup-learning-rate 2e-3

test: $(DEV)/.installed
	$(DEV)/bin/python -m pytest

test-quick: $(DEV)/.installed
	$(DEV)/bin/python -m pytest -m "not slow"

check: $(DEV)/.installed
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy
	$(DEV)/bin/lint-imports

bench: $(DEV)/.installed
	$(DEV)/bin/python -m benchmarks.train_step
	$(DEV)/bin/python -m benchmarks.rollouts

clean:
	rm -rf $(DEV) $(DEMO) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
