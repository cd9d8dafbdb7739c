# Quire. `make serve` and `make test` do everything that a fresh Debian machine with git, make and python3 needs.
#   make serve  PORT=8000 MODEL=folder-or-hub-id ARGS="--max-num-seqs 64"

PYTHON ?= python3
PORT ?= 8000
MODEL ?=
ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/

.PHONY: setup test-setup serve test nightly lint models clients ray-test image image-name builder publish image-test cluster-demo soak gpu-test gpu-bench gpu-shapes ptx evaluation evaluation-gpu clean

PIP := $(RUN)python -m pip install --disable-pip-version-check -c constraints.txt

# What serving needs.
setup: $(VENV)/.ready

# pip downloads what is missing only, so setting up again after a change is quick.
$(VENV)/.ready: pyproject.toml constraints.txt .ci/debian-packages
	@command -v $(PYTHON) >/dev/null || \
		{ echo "There is no $(PYTHON): apt-get install python3, or set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Quire needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=..."; exit 1; }
	@PYTHON=$(PYTHON) bash .ci/debian-packages
	@test -x $(RUN)python || $(PYTHON) -m venv $(VENV)
	@echo "Python packages for serving, into $(VENV): up to 2.8 GB with torch and CUDA's libraries, less what is there."
	@test -n "$$PIP_EXTRA_INDEX_URL" || \
		echo "(Without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes it 0.3 GB.)"
	$(PIP) -e .
	@touch $@

# And what tests need beside it.
test-setup: $(VENV)/.test-ready

$(VENV)/.test-ready: $(VENV)/.ready .ci/helm.py
	@PYTHON=$(PYTHON) bash .ci/debian-packages test
	@echo "Python packages for tests, and two versions of Helm, into $(VENV): 0.2 GB, less what is there."
	$(PIP) -e '.[test]'
	@$(RUN)python .ci/helm.py $(VENV)
	@touch $@

serve: setup
	@exec $(RUN)quire serve $(MODEL) --port $(PORT) $(ARGS)

# Three keep two cores busy, since many tests wait for processes. One thread for each: torch's others only spin there.
# Bytecode is kept, whatever the environment says: each of the three would compile all tests again.
TESTS = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(RUN)python -m pytest -n 3 --dist worksteal -q

test: test-setup lint
	$(TESTS)

# The same with many more examples of memory, scheduling and the API (docs/development.md has how many), and other
# ones each time where Hypothesis draws them.
nightly: test-setup
	HYPOTHESIS_PROFILE=nightly $(TESTS)

lint: test-setup
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy

# Compares every causal model type of transformers with itself over the paged cache, and writes the table of
# docs/models.md. Five minutes.
models: test-setup
	$(RUN)python -m tests.models.models_page

# Tries clients that are too large for every run: Claude Code, Codex CLI, OpenCode, Continue, LangChain and LangGraph
# (LangChain in JavaScript, too), Vercel's AI SDK, LiteLLM, OpenAI's Agents SDK, PydanticAI, smolagents, Haystack,
# LlamaIndex, AutoGen, Instructor, DSPy, Aider, lm-eval, GuideLLM, Open WebUI (with Chromium; it wants Python 3.11 or 3.12)
# and LibreChat's agents. They are installed into .clients, 5 GB, by uv, since pip takes minutes to find versions that go
# together; needs node and npm. Five minutes.
FRAMEWORKS = langchain langgraph langchain-openai litellm openai-agents 'pydantic-ai-slim[openai]' smolagents haystack-ai \
	autogen-agentchat 'autogen-ext[openai]' instructor dspy
UV = $(RUN)python -m uv pip install -q --python $(VENV)/bin/python
clients: test-setup
	$(PIP) -q uv
	$(UV) --target .clients/python $(FRAMEWORKS)
	$(UV) --target .clients/llama-index 'llama-index-core>=0.14' llama-index-llms-openai-like
	$(UV) --target .clients/aider aider-chat
	$(UV) --target .clients/lm-eval 'lm-eval[api]'
	$(UV) --target .clients/guidellm guidellm
	$(UV) --target .clients/open-webui --override tests/clients/without_torch.txt open-webui
	npm install --prefix .clients --no-audit --no-fund --silent @anthropic-ai/claude-code @openai/codex opencode-ai @continuedev/cli \
		ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic @langchain/core @langchain/openai zod
	npm install --prefix .clients/librechat --no-audit --no-fund --silent @librechat/agents librechat-data-provider
	QUIRE_CLIENTS=.clients $(RUN)python -m pytest -q tests/clients

# A real Ray with two nodes and two replicas on the CPU; Ray and what it needs are 0.4 GB, so they are no part of the
# other tests. Three minutes.
ray-test: test-setup
	$(PIP) -q -e '.[ray]'
	QUIRE_RAY=1 $(RUN)python -m pytest -q tests/ray

# The image under the name that the chart has for it, with its appVersion as the tag, and with docker, podman or buildah.
IMAGE ?= $(shell sed -n '/^image:/,/repository:/s/^ *repository: \([^ ]*\).*/\1/p' helm/values.yaml)
TAG := $(shell sed -n 's/^appVersion: //p' helm/Chart.yaml)
BUILDER ?= $(shell command -v docker || command -v podman || command -v buildah)
BUILD_FLAGS ?=

image:
	@test -n "$(BUILDER)" || { echo "Building an image needs docker, podman or buildah."; exit 1; }
	$(BUILDER) build $(BUILD_FLAGS) -t $(IMAGE):$(TAG) .

image-name:
	@echo $(IMAGE):$(TAG)

builder:
	@echo $(BUILDER)

# make publish REGISTRY=registry.example/team: the image and a chart that names it, for a registry that you are logged in to.
publish:
	@bash .ci/publish $(REGISTRY)

# Builds the image without root or a daemon, publishes it to a registry of its own, and serves from what the chart that was
# published says. Debian with buildah; without a way to FROM's registry, on a base that it makes of Debian's packages.
image-test:
	@PYTHON=$(PYTHON) bash .ci/debian-packages image
	test -x $(RUN)python || $(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install --disable-pip-version-check -q -c constraints.txt pytest pytest-timeout pyyaml
	$(RUN)python .ci/helm.py $(VENV)
	$(RUN)python -m pytest -q -o timeout=0 .ci/test_image.py

# Two replicas and a router on loopback: hit rates and times to the first token, round-robin, routed, and during each
# fault of Redis. Five minutes.
cluster-demo: test-setup
	$(RUN)python -m quire.loadtest.cluster_demo

# An hour of everything at once: all kinds of requests on two replicas with little memory, Redis and a replica killed
# again and again, hostile clients. It judges times as a server's own, without what the machine had it wait; on four
# cores there is little of that.
soak: test-setup
	$(RUN)python -m quire.loadtest.chaos --seconds 3600 --json loadtest/results/chaos.json

# On a machine with a CUDA device. QUIRE_PYTHON is whichever Python has torch, triton and pytest there.
QUIRE_PYTHON ?= $(RUN)python

# One thread for each process: twelve that all take every core wait for each other for minutes.
gpu-test:
	OMP_NUM_THREADS=1 $(QUIRE_PYTHON) -m pytest -n 12 --dist worksteal -q tests/kernels tests/models tests/engine

# Whether a change left the kernels as they were: every kernel's PTX, for each GPU and format, against the digests in
# tests/kernels/ptx_digests.json. WRITE=--write writes them anew. No GPU.
ptx: test-setup
	$(RUN)python tests/kernels/ptx_digests.py $(WRITE)

# How near decode steps of ten real configurations, and of three with experts, come to what their bytes allow.
gpu-shapes:
	$(QUIRE_PYTHON) -m quire.loadtest.gpu_shapes --json loadtest/results/shapes.json

gpu-bench:
	$(QUIRE_PYTHON) -m quire.loadtest.gpu_bench

# The PagedAttention paper's figures, written to loadtest/results/evaluation/: by simulation, and from the runs of a
# real engine that are in its folder real/. No GPU.
evaluation: test-setup
	$(RUN)python -m quire.loadtest figures --processes $$(nproc)

# The same experiments on the real engine, with CUDA; `make evaluation` then puts them beside the simulation. A call ends
# within ten minutes, and the next one goes on where it stopped.
evaluation-gpu:
	$(QUIRE_PYTHON) -m quire.loadtest.evaluation.real

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
