# make bench | test | test-all | test-torch | lint | docs. PYTHON is the interpreter to build on, TORCH what to install
# where it has no CUDA torch.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
STAMP  := $(VENV)/.ready

LOWEST := $(shell sed -n 's/^ *"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
CORE   := $(addprefix tests/cpu/test_,\
	api.py budgets.py expressions.py faces.py front.py mods.py properties.py reliability.py torch_kernels.py)

.PHONY: bench test test-all test-torch lint fix docs clean

bench: $(STAMP)
	$(BIN)/python -m sartor bench --quick --max-seconds 180

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

# And what `make test` takes samples of.
test-all: test
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m 'thorough and not gpu and not slow'

# What needs torch alone, on another torch: the lowest allowed, or TORCH. Gigabytes where pip finds CUDA builds only.
test-torch: TORCH = torch==$(LOWEST).*
test-torch:
	$(PYTHON) -m venv $(VENV)-torch
	$(VENV)-torch/bin/python -m pip install -q "$(TORCH)" pytest hypothesis
	$(VENV)-torch/bin/python -m pip install -q -e '.[lab]'
	$(VENV)-torch/bin/python -m pytest -q $(CORE)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

fix: $(STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

# The site, in build/site; links that lead nowhere are errors.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Where PYTHON already has a CUDA torch and what the lab needs, nothing is fetched or built, so that it works offline: a
# .pth file names the folder of its packages (--system-site-packages would miss those of a venv) and that of ours.
HAVE  = import torch, numpy, typer, rich, matplotlib; assert torch.version.cuda
PATHS = import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)), os.path.abspath("src"), sep="\n")
PURE  = import sysconfig; print(sysconfig.get_path("purelib"))

$(STAMP): pyproject.toml setup.py
	@if $(PYTHON) -c '$(HAVE)' 2>/dev/null; then \
		echo "using the CUDA torch of $(PYTHON)" && \
		$(PYTHON) -m venv --system-site-packages $(VENV) && \
		$(PYTHON) -c '$(PATHS)' > "$$($(BIN)/python -c '$(PURE)')/sartor.pth"; \
	else \
		$(PYTHON) -m venv $(VENV) && \
		$(BIN)/python -m pip install -q "$(TORCH)" && \
		$(BIN)/python -m pip install -q -e '.[dev]'; \
	fi
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-* results build dist
