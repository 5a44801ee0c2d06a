# The commands of the README. The first run makes .venv and installs; stamps make the next one start at once.
#   make quickstart   a question answered with drafts and without       make serve   the stack until Ctrl-C
#   make test         ruff, mypy and all tests                          make bench   the figures of the README
#   make bench-gpu    all figures of an NVIDIA GPU, about ten minutes
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV ?= .venv
CONFIG ?= configs/quickstart.yaml
ARGS ?=
# Processes that share out the tests; 0: none do.
WORKERS ?= 0
TORCH := torch>=2.11
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: quickstart serve test lint bench bench-gpu clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.installed
	@$(BIN)/outrider quickstart $(CONFIG) $(ARGS)

serve: $(VENV)/.installed
	@exec $(BIN)/outrider up $(CONFIG)

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.serve $(ARGS)

bench-gpu: $(VENV)/.installed-test
	@$(BIN)/python -m benchmarks.gpu --out benchmarks/results $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build ./*.egg-info

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "Outrider needs Python 3.11 or newer; say which with PYTHON=..." >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# PyPI's torch for Linux brings gigabytes of CUDA libraries. Without an NVIDIA GPU take a CPU build instead: one that pip has
# at hand (find-links), else PyTorch's own index of them, and PyPI's only where that cannot be reached.
$(VENV)/.torch: $(VENV)/.python
	@echo "Installing torch"
	@if [ "$$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then \
		$(PIP) install "$(TORCH)"; \
	elif $(PIP) install --no-index --no-deps "$(TORCH)" 2>/dev/null; then \
		:; \
	elif $(BIN)/python -c "import urllib.request as r; r.urlopen('$(TORCH_CPU_INDEX)/torch/', timeout=10)" 2>/dev/null; then \
		$(PIP) install --index-url $(TORCH_CPU_INDEX) "$(TORCH)"; \
	else \
		echo "$(TORCH_CPU_INDEX) cannot be reached: taking PyPI's torch, which may bring CUDA libraries"; \
		$(PIP) install "$(TORCH)"; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "Installing outrider"
	@$(PIP) install --editable ".[quickstart]"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed pyproject.toml
	@echo "Installing what the tests need"
	@$(PIP) install --editable ".[quickstart,test]"
	@touch $@
