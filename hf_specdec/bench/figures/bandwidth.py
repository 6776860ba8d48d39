"""What memory allows: bytes that a decoding step has to read, and how fast the device copies."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.bench.models.loading import LoadedPair

# Well beyond any cache of the device.
_COPIED = {"cpu": 256 * 2**20, "other": 2 * 2**30}
_COPIES = 7


def describe(pair: LoadedPair, context: int) -> dict[str, Any]:
    """Bytes of a step of the target at batch size 1 and a context of so many tokens, and bytes/s of the device."""
    device = pair.target.device
    return {
        "context": context,
        "weight_bytes": weight_bytes(pair.target),
        "cache_bytes": None if pair.encoder_decoder else cache_bytes(pair.target, context),
        "copy_bytes_per_second": copy_rate(device, _COPIED["cpu" if device.type == "cpu" else "other"]),
    }


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that every step reads: all but an input embedding of its own, of which it reads one row."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    unread = 0 if tied else embedding.weight.nbytes
    return sum(parameter.nbytes for parameter in model.parameters()) - unread


@torch.inference_mode()
def cache_bytes(model: PreTrainedModel, context: int) -> int:
    """Bytes of keys and values of one row of `context` tokens: what a cache of a token holds, that often."""
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    return context * sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes per second of copying `size` bytes within the device's memory, reading and writing counted."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    seconds = [_copy_seconds(source, destination) for _ in range(_COPIES + 1)]
    return 2 * size / median(seconds[1:])


def share(tokens_per_second: float, memory: dict[str, Any]) -> float | None:
    """Share of the bandwidth limit that plain decoding at batch size 1 reaches; None where bytes aren't known."""
    if memory["cache_bytes"] is None:
        return None
    bytes_read = memory["weight_bytes"] + memory["cache_bytes"]
    return float(tokens_per_second * bytes_read / memory["copy_bytes_per_second"])


def _copy_seconds(source: Tensor, destination: Tensor) -> float:
    _wait(source.device)
    start = time.perf_counter()
    destination.copy_(source)
    _wait(source.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
