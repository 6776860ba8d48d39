"""Settings of every test: offline, and one thread, as tiny models lose more by waiting for threads than they gain."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from helpers.distributions import VOCABULARY
from helpers.models import llama, noisy
from transformers import PreTrainedModel

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def toy_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target whose outputs can be enumerated, and a draft near it."""
    target = llama(seed=5, vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    return target, noisy(target, 0.35)
