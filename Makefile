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
NEXT := .venv-next
.PHONY: install demo test test-quick test-next check bench clean

install: $(DEV)/.installed

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

demo: $(DEMO)/.installed
	$(DEMO)/bin/mcp-rl train --server examples/sql_agent/server.py --model $(MODEL) --steps $(STEPS) --seed $(SEED) \
	  --output $(RUN) --num-scenarios 48 --held-out 0.25 --max-calls 1 --max-turns 3 --max-tokens 48 \
	  --lora-layers 15 --learning-rate 1e-3 --warmup-steps 4 --warmup-learning-rate 2e-3

test: $(DEV)/.installed
	$(DEV)/bin/python -m pytest

test-quick: $(DEV)/.installed
	$(DEV)/bin/python -m pytest -m "not slow"

# Without CrewAI the newest MCP, FastMCP and OpenAI libraries fit together: the parts that touch them, on those.
test-next: $(NEXT)/.installed
	$(NEXT)/bin/python -m pytest -m "not slow" tests/core tests/mcp tests/integrations --ignore-glob='*crewai*'

check: $(DEV)/.installed
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy
	$(DEV)/bin/lint-imports

bench: $(DEV)/.installed
	$(DEV)/bin/python -m benchmarks.train_step
	$(DEV)/bin/python -m benchmarks.rollouts
	$(DEV)/bin/python -m benchmarks.judge

clean:
	rm -rf $(DEV) $(DEMO) $(NEXT) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
