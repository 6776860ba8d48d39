"""The memory limit: bytes that a decoding step must read, and how fast the device reads memory."""

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

# Larger than any cache of the device.
BUFFER = {"cpu": 256 * 2**20, "other": 2 * 2**30}
_READS = 15


def describe(pair: LoadedPair, context: int) -> Memory:
    """Bytes that a step of the target reads at batch size 1 with `context` tokens in the cache."""
    cache = None if pair.encoder_decoder else cache_bytes(pair.target, context)
    return Memory(context, weight_bytes(pair.target), cache)


def has_room(size: int) -> bool:
    """Whether `size` bytes are at most half of the free memory; True where the system does not report it."""
    try:
        return 2 * size <= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return True


def weight_bytes(model: PreTrainedModel) -> int | None:
    """Bytes of the weights that every step reads; None for mixtures of experts, where this depends on the text.

    Embedding tables count only if they are the output head too: a step reads a single row of the others.
    """
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        return None
    head = model.get_output_embeddings()
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    unread = {id(table) for table in tables if head is None or table is not head.weight}
    return sum(stored_bytes(weight) for weight in model.parameters() if id(weight) not in unread)


def stored_bytes(weight: Tensor) -> int:
    """Bytes of the tensors that make up a weight; a quantized weight itself reports the size of its unpacked dtype."""
    return sum(part.nbytes for part in stored_tensors(weight)) or weight.nbytes


@torch.no_grad()  # quanto's int4 weights fail under `inference_mode`
def cache_bytes(model: PreTrainedModel, context: int) -> int:
    """Bytes of the keys and values of one row of `context` tokens: `context` times those of one token."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, **{cache_argument(model): cache}, use_cache=True)
    return context * sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def device_rate(device: torch.device) -> float:
    """Bytes per second at which a device reads its main memory."""
    return read_rate(device, BUFFER["cpu" if device.type == "cpu" else "other"])


def read_rate(device: torch.device, size: int) -> float:
    """Measure the bandwidth in bytes per second: the fastest of several sums over `size` bytes of the device's memory.

    The fastest, because the figure is a limit: whatever slows down a sum slows down decoding as well.
    """
    numbers = torch.ones(size // 4, device=device)
    HugePages([numbers]).gather()  # as for the weights of the fastest methods
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
