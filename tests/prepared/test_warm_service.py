"""A service that has met all of its lengths, batch sizes and settings prepares nothing anew."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from helpers.models import llama, noisy, prompts
from helpers.patches import noted
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.prepared.engine import Engine
from hf_specdec.prepared.engine_store import kept_engines
from hf_specdec.prepared.prepared_rounds import PreparedRounds

LENGTHS = (9, 140, 270)  # of prompts; each falls into another bucket of capacities
SETTINGS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": False, "num_assistant_tokens": 2},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "top_k": 5, "temperature": 1.3},
)
CALLS = list(product(LENGTHS, (1, 2), SETTINGS))


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = llama(num_hidden_layers=1, max_position_embeddings=512)
    return target, noisy(target)


@pytest.fixture
def prepared(fast_rounds: list[PreparedRounds], monkeypatch) -> Iterator[list[int]]:
    """One entry for each preparation of steps."""
    hf_specdec.release()
    yield noted(monkeypatch, Engine, "prepare")
    hf_specdec.release()


def _call(
    models: tuple[PreTrainedModel, PreTrainedModel], length: int, rows: int, settings: dict[str, Any]
) -> torch.Tensor:
    call = {**prompts(rows, length), "max_new_tokens": 4, "num_assistant_tokens": 3, **settings}
    target, draft = models
    return target.generate(**call, assistant_model=draft, cache_implementation="static")


def test_every_length_and_setting_is_prepared_once(models: Any, prepared: list[int]) -> None:
    for call in CALLS:
        _call(models, *call)
    assert len(prepared) == len(CALLS) == 24
    buffers = {id(engine.buffers) for engine in kept_engines(models[0], compile=False)}
    assert len(buffers) == len(LENGTHS) * 2, "settings share them"
    for call in random.Random(0).sample(CALLS, len(CALLS)):
        _call(models, *call)
    assert len(prepared) == len(CALLS)


def test_calls_at_the_same_time_prepare_each_for_itself_and_later_ones_find_it(models, prepared) -> None:
    """Since each needs buffers of its own."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(_call, models, *call) for call in CALLS[:4] * 6]:
            done.result()
    assert 4 <= len(prepared) <= 2 * 4
    prepared.clear()
    for call in CALLS[:4]:
        _call(models, *call)
    assert not prepared
