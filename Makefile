# Each of these does all of its set-up in .venv, once.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
RUN := HF_HUB_OFFLINE=1 $(VENV)/bin/python

.PHONY: benchmark test lint

benchmark: $(READY)
	$(RUN) scripts/assisted_generation.py --task benchmark --assisted_generation
	$(RUN) scripts/assisted_generation.py --task benchmark --assisted_generation --do_sample

test: $(READY)
	$(RUN) -m pytest -q -n 2 --dist loadfile --max-worker-restart 1 -m "not install"

lint: $(READY)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy hf_specdec
	$(VENV)/bin/lint-imports

$(READY): requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet $$(grep '^torch==' requirements.txt)
	$(VENV)/bin/pip install --quiet -r requirements.txt
	touch $@
