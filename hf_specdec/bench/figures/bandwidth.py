"""What memory allows: bytes that a decoding step has to read, and how fast the device reads."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.models.cache_names import cache_argument
from hf_specdec.models.stored_tensors import stored_tensors
from hf_specdec.prepared.huge_pages import HugePages

# Well beyond any cache of the device.
BUFFER = {"cpu": 256 * 2**20, "other": 2 * 2**30}
_READS = 15

CallKey = tuple[tuple[int, ...], int]


def describe(pair: LoadedPair, context: int) -> dict[str, Any]:
    """Bytes of a step of the target at batch size 1 and a context of so many tokens."""
    return {
        "context": context,
        "weight_bytes": weight_bytes(pair.target),
        "cache_bytes": None if pair.encoder_decoder else cache_bytes(pair.target, context),
    }


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


def rates(result: Result, method: str) -> dict[CallKey, float]:
    """Bytes per second that memory was read at after each call of a method at batch size 1, by prompts and repeat."""
    read = [reading for reading in result.get("readings", ()) if reading["method"] == method]
    return {(tuple(reading["prompts"]), reading["repeat"]): reading["bytes_per_second"] for reading in read}


def share(result: Result, method: str) -> float | None:
    """Share of the bandwidth limit that a plain method reaches at batch size 1; None where bytes aren't known.

    That is the bytes that its steps have read / those that memory would have given in the same time. How fast memory
    is was measured after each call, since other jobs can slow a shared machine's memory for minutes.
    """
    memory, measured = result["memory"], rates(result, method)
    # Results of earlier versions have one rate, the fastest of two moments.
    once = memory.get("read_bytes_per_second")
    decoded, given = 0, 0.0
    for call in speed.calls_of(result, method, batch=1):
        part, rate = speed.decode_part(call), measured.get((call.prompts, call.repeat), once)
        if part is not None and rate is not None:
            seconds, tokens = part
            decoded, given = decoded + tokens, given + seconds * rate
    if memory["weight_bytes"] is None or memory["cache_bytes"] is None or not given:
        return None
    return float(decoded * (memory["weight_bytes"] + memory["cache_bytes"]) / given)


def _seconds_to_sum(numbers: Tensor) -> float:
    _wait(numbers.device)
    start = time.perf_counter()
    numbers.sum()
    _wait(numbers.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
