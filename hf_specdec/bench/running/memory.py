"""What memory allows: bytes that a decoding step has to read, and how fast the device reads."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Memory
from hf_specdec.models.cache_names import cache_argument
from hf_specdec.models.stored_tensors import stored_tensors
from hf_specdec.prepared.huge_pages import HugePages

# Well beyond any cache of the device.
BUFFER = {"cpu": 256 * 2**20, "other": 2 * 2**30}
_READS = 15


def describe(pair: LoadedPair, context: int) -> Memory:
    """Bytes of a step of the target at batch size 1 and a context of so many tokens."""
    cache = None if pair.encoder_decoder else cache_bytes(pair.target, context)
    return Memory(context, weight_bytes(pair.target), cache)


def has_room(size: int) -> bool:
    """Whether `size` bytes are at most half of the free memory; True where the system does not report it."""
    try:
        return 2 * size <= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return True


def weight_bytes(model: PreTrainedModel) -> int | None:
    """Bytes of the weights that every step reads; None for mixtures of experts, whose text chooses what is read.

    Of tables of tokens and positions a step reads a row, unless the output head is such a table.
    """
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        return None
    head = model.get_output_embeddings()
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    unread = {id(table) for table in tables if head is None or table is not head.weight}
    return sum(stored_bytes(weight) for weight in model.parameters() if id(weight) not in unread)


def stored_bytes(weight: Tensor) -> int:
    """Those of the tensors that a quantized weight consists of; its own are those of the dtype that it stands for."""
    return sum(part.nbytes for part in stored_tensors(weight)) or weight.nbytes


@torch.no_grad()  # int4 weights of quanto fail in `inference_mode`
def cache_bytes(model: PreTrainedModel, context: int) -> int:
    """Bytes of keys and values of one row of `context` tokens: `context` times those of one token."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, **{cache_argument(model): cache}, use_cache=True)
    return context * sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def device_rate(device: torch.device) -> float:
    """Bytes per second at which a device reads its memory, beyond its caches."""
    return read_rate(device, BUFFER["cpu" if device.type == "cpu" else "other"])


def read_rate(device: torch.device, size: int) -> float:
    """Bytes per second of reading `size` bytes of the device's memory, in the fastest of several sums over them.

    The fastest, because the figure is a limit: what slows a sum down slows decoding down as well.
    """
    numbers = torch.ones(size // 4, device=device)
    HugePages([numbers]).gather()  # where the fastest methods have their weights
    return size / min(_seconds_to_sum(numbers) for _ in range(_READS))


def _seconds_to_sum(numbers: Tensor) -> float:
    _wait(numbers.device)
    start = time.perf_counter()
    numbers.sum()
    _wait(numbers.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
