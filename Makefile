# Each of these first sets up the environment that it needs, once.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
RUN := HF_HUB_OFFLINE=1 $(VENV)/bin/python
PYTEST := -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 1 -m "not install"
# What setup.py admits; `make test-oldest TORCH=2.13.0` tries the oldest transformers with another torch.
oldest = $(shell sed -n 's/.*"$(1)>=\([0-9.]*\).*/\1/p' setup.py).0
TORCH ?= $(call oldest,torch)
TRANSFORMERS := $(call oldest,transformers)

.PHONY: benchmark real real-tables test test-install test-oldest families fuzz gpu-check gpu-tables lint

# ARGS="--repeats 1" and the like are added to both runs.
benchmark: $(VENV)/.ready
	$(RUN) scripts/assisted_generation.py --task benchmark --assisted_generation $(ARGS)
	$(RUN) scripts/assisted_generation.py --task benchmark --assisted_generation --do_sample $(ARGS)

# Small models with real weights, 2 GB, into .models: make real MODELS="smollm2-135m-instruct whisper-base" for some.
real: $(VENV)/.ready
	$(RUN) -m hf_specdec.bench.models.real $(MODELS)

test: $(VENV)/.ready
	$(RUN) $(PYTEST)

# The wheel, in fresh environments that borrow torch and transformers from this one.
test-install: $(VENV)/.ready
	$(RUN) -m pytest -q -m install

test-oldest: $(OLDEST)/.ready
	HF_HUB_OFFLINE=1 $(OLDEST)/bin/python $(PYTEST)

# Every class of transformers that generates text, as small as it can be made, against plain generate. All of them take
# a quarter of an hour: make families CLASSES="LlamaForCausalLM MllamaForConditionalGeneration" for some.
families: $(VENV)/.ready
	PYTHONPATH=.:tests $(RUN) tests/families/sweep.py $(CLASSES)

# Random calls against plain generate, in chunks with a seed each. A stopped run goes on after its last finished chunk.
# What fails is kept in .hypothesis and tried first next time.
CHUNK := 250
FUZZED := .hypothesis/fuzz# the run's first seed, then the seeds of finished chunks
fuzz: CASES ?= 5000
fuzz: $(VENV)/.ready
	mkdir -p .hypothesis; test -s $(FUZZED) || date +%s > $(FUZZED); \
	while finished=$$(($$(wc -l < $(FUZZED)) - 1)); left=$$(($(CASES) - finished * $(CHUNK))); [ $$left -gt 0 ]; do \
		seed=$$(($$(head -n 1 $(FUZZED)) + finished)); \
		HF_SPECDEC_FUZZ_CASES=$$((left < $(CHUNK) ? left : $(CHUNK))) $(RUN) -m pytest -q -x tests/fuzz/test_any_input.py \
			-o faulthandler_timeout=0 --hypothesis-show-statistics --hypothesis-seed=$$seed || exit; \
		echo $$seed >> $(FUZZED); \
	done; \
	rm $(FUZZED)

# On a machine with a GPU, in an environment of yours that has this package's requirements and pytest.
# In parallel where pytest-xdist is installed.
gpu-check: WORKERS = $(shell $(PYTHON) -c "import os, xdist; print('-n', min(8, os.cpu_count()), '--dist worksteal')" 2>/dev/null)
gpu-check:
	@$(PYTHON) -c "import torch; torch.cuda.is_available() or print('No GPU was found: checks run on the CPU.')"
	HF_HUB_OFFLINE=1 HF_SPECDEC_GPU_REPORT=gpu-check.jsonl $(PYTHON) -m pytest -m gpu tests/gpu $(WORKERS)

# As gpu-check. One run per batch size, which writes its JSON when it ends. After 8 minutes the run is stopped; its
# measurements are kept, and the same command continues. On a CPU: make gpu-tables SHAPE=tiny-llama DTYPE=float32.
SHAPE ?= llama-2-7b
DTYPE ?= bfloat16
BATCHES ?= 1 64 16 4
LIMIT ?= 475# seconds
gpu-tables:
	@$(PYTHON) -c "import torch; torch.cuda.is_available() or '$(SHAPE)'.startswith('tiny') or \
		exit('No GPU was found. To try the command on a CPU: make gpu-tables SHAPE=tiny-llama DTYPE=float32')"
	@end=$$(($$(date +%s) + $(LIMIT))); for batch in $(BATCHES); do \
		left=$$((end - $$(date +%s))); folder=gpu-tables/$(SHAPE)-$(DTYPE)/batch-$$batch; \
		if [ $$left -le 0 ] || [ -n "$$(ls $$folder/*.json.gz 2>/dev/null)" ]; then continue; fi; \
		HF_HUB_OFFLINE=1 timeout -s INT -k 30 $$left $(PYTHON) scripts/assisted_generation.py --task engines \
			--model_name synthetic:$(SHAPE) --dtype $(DTYPE) --engines static compiled --num_assistant_tokens 4 auto \
			--batch_size $$batch --limit $$batch --repeats 3 --max_new_tokens 64 --prompt_lengths 128 \
			--output_dir $$folder; \
	done; missing=0; \
	for batch in $(BATCHES); do ls gpu-tables/$(SHAPE)-$(DTYPE)/batch-$$batch/*.md 2>/dev/null || \
		{ missing=1; echo "Batch size $$batch is not finished: the same command continues."; }; done; exit $$missing

# Spec-Bench's questions to the models of `make real`: make real-tables QUESTIONS=question.jsonl. Greedy, and with the models'
# own sampling. A table that is finished is not measured again; one that was stopped is continued.
QUESTIONS ?= question.jsonl
PER_KIND ?= 2# questions of each of Spec-Bench's six kinds
TABLES ?= real-tables
real-tables: real
	@for model in smollm2-135m-instruct gemma-3-270m; do for kind in greedy sampling; do \
		folder=$(TABLES)/real-$$model-$$kind; \
		if [ -n "$$(ls $$folder/*.json.gz 2>/dev/null)" ]; then echo "$$folder: is there"; continue; fi; \
		$(RUN) scripts/assisted_generation.py --task subtasks --model_name $$model --drafter suffix --compile --dataset spec_bench \
			--dataset_path $(QUESTIONS) --limit $(PER_KIND) --repeats 3 --max_new_tokens 64 --output_dir $$folder \
			$$([ $$kind = greedy ] || echo --do_sample) $(ARGS) || exit; \
	done; done

lint: $(VENV)/.ready
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy hf_specdec
	$(VENV)/bin/lint-imports

$(VENV)/.ready: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet $$(grep '^torch==' requirements.txt)
	$(VENV)/bin/pip install --quiet -r requirements.txt
	touch $@

$(OLDEST)/.ready: requirements.txt setup.py
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet torch==$(TORCH)
	grep -v -e '^torch==' -e '^transformers==' -e '^triton==' -e '^xgrammar==' requirements.txt > $(OLDEST)/requirements.txt
	$(OLDEST)/bin/pip install --quiet torch==$(TORCH) transformers==$(TRANSFORMERS) -r $(OLDEST)/requirements.txt
	touch $@
