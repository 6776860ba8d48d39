"""A static cache whose rows have different lengths; rolling back moves no data and changes no shape.

Token i of a row, padding included, is in slot i. A pass writes each row's tokens to given slots. The caller keeps the
rows' lengths: slots past a row's length are masked until they are overwritten. A pass over fewer rows than the cache
has uses its first rows. For an encoder-decoder, it also holds the keys of the encoder's output, which passes share.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

GROWTH = 256  # slots that a growing cache adds at a time
LEAST_MAPPED = 2**20  # bytes; smaller tensors share pages with others and are not mapped separately
_POSIX = hasattr(mmap, "MAP_ANONYMOUS")


@dataclass(frozen=True)
class CacheSize:
    """The size of a call's static caches, see `RowsCache`."""

    capacity: int
    grows: bool = False


def zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros with another tensor's type and device. On a CPU, slots take memory only when they are written.

    Later calls, in inference mode or not, can write to them.
    """
    with torch.inference_mode(False):
        return _zeros(shape, like)


def _zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    count = math.prod(shape)
    if like.device.type != "cpu" or count * like.itemsize < LEAST_MAPPED:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)} if _POSIX else {}
    memory = mmap.mmap(-1, count * like.itemsize, **flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # with huge pages, the first slots of all heads would take all the memory
        with suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


class Slots:
    """The slots that the next pass writes and reads; all layers of a cache share the object.

    Attributes:
        written: `[m, k]`, the slots of the pass's tokens in the first m rows.
        rows: `[m, 1]`, the indices of these rows.
        span: attention reads slots 0 to `span`; at most the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.next_pass(torch.zeros(0, 0, dtype=torch.long), capacity)

    def next_pass(self, written: Tensor, span: int) -> None:
        """Set the slots for all layers."""
        self.written, self.span = written, span
        self.rows = torch.arange(written.shape[0], device=written.device).unsqueeze(1)


class RowsLayer(CacheLayerMixin):
    """One layer: keys and values `[B, H, capacity, D]`, allocated at the first pass and updated in place.

    Args:
        capacity: slots of each row.
        slots: the slots of the next pass.
        grows: allocate `GROWTH` slots at a time as they are needed, up to the capacity.
    """

    def __init__(self, capacity: int, slots: Slots, grows: bool = False) -> None:
        super().__init__()
        self.capacity = capacity
        self.slots = slots
        self.grows = grows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for states `[B, H, k, D]`; keys and values may differ in D."""
        self.keys, self.values = (
            zeros((*states.shape[:2], self._needed(self.slots.span), states.shape[-1]), states)
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def reserve(self, span: int) -> None:
        """Allocate memory for `span` slots."""
        if self.is_initialized and (more := self._needed(span) - self.keys.shape[2]) > 0:
            self.keys, self.values = (torch.nn.functional.pad(old, (0, 0, 0, more)) for old in (self.keys, self.values))

    def drop(self) -> None:
        """Free the memory until `allocate`."""
        if self.is_initialized and self.keys.numel():
            self._dropped = self.keys.shape, self.values.shape
            self.keys, self.values = self.keys.new_empty(0), self.values.new_empty(0)

    def allocate(self) -> None:
        """Undo `drop`; all numbers are then zero."""
        if self.is_initialized and not self.keys.numel():
            keys, values = self._dropped
            self.keys, self.values = zeros(keys, self.keys), zeros(values, self.values)

    def tensors(self) -> list[Tensor]:
        """Keys and values; none before the first pass."""
        return [self.keys, self.values] if self.is_initialized else []

    def _needed(self, span: int) -> int:
        return min(self.capacity, -(-span // GROWTH) * GROWTH) if self.grows else self.capacity

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[m, H, k, D]` to the slots of the pass; return all slots up to the span, `[m, H, span, D]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        written, span = self.slots.written, self.slots.span
        for stored, states in ((self.keys, key_states), (self.values, value_states)):
            if written.shape[0] == 1:
                stored[:1].index_copy_(2, written[0], states)
            else:
                stored[self.slots.rows, :, written] = states.transpose(1, 2)
        rows = written.shape[0]
        return self.keys[:rows, :, :span], self.values[:rows, :, :span]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The length and offset of the keys that `update` returns."""
        return self.slots.span, 0

    def get_seq_length(self) -> int:
        """0: rows have different lengths; passes are given positions and masks."""
        return 0

    def get_max_length(self) -> int:
        """Slots of each row."""
        return self.capacity


class EncodedLayer(RowsLayer):
    """One layer's keys and values of the encoder's output, `[B, H, S, D]`, allocated once and overwritten by calls."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Replace what is stored by `[B, H, S, D]`; return that."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.keys.copy_(key_states), self.values.copy_(value_states)


class RowsCache(Cache):
    """A static cache for a decoder, fed by `static_runner.StaticRunner`.

    Args:
        config: the model's, for the number of layers.
        capacity: the most tokens of a row, including drafts.
        grows: allocate memory as texts grow instead of all at once; compiled steps need a cache that does not grow.
        encoded: `[B, S, H]`, the shape of the encoder's output; None for a decoder-only model.

    Attributes:
        capacity, grows, encoded: as given.
        slots: those of the next pass.
        cross: the layers of cross-attention; None for a decoder-only model.
    """

    def __init__(
        self, config: PreTrainedConfig, capacity: int, *, grows: bool = False, encoded: torch.Size | None = None
    ) -> None:
        self.slots = Slots(capacity)
        self.capacity, self.grows, self.encoded = capacity, grows, encoded
        count = range(config.get_text_config(decoder=True).num_hidden_layers)
        super().__init__(layers=[RowsLayer(capacity, self.slots, grows) for _ in count])
        self.cross: Cache | None = None
        if encoded is not None:
            self.cross = Cache(layers=[EncodedLayer(encoded[1], self.slots) for _ in count])

    def for_pass(self, *, encodes: bool) -> Cache:
        """The cache in the form that the model takes.

        Args:
            encodes: the pass reads an encoder's output, and leaves its keys for later ones. The first one always does.
        """
        if self.cross is None:
            return self
        both = EncoderDecoderCache(self, self.cross)
        has_keys = not encodes and self.cross.layers[0].is_initialized
        both.is_updated = dict.fromkeys(range(len(self.layers)), has_keys)
        return both

    @property
    def _all_layers(self) -> list[Any]:
        return [*self.layers, *(() if self.cross is None else self.cross.layers)]

    def reserve(self, span: int) -> None:
        """Allocate memory for `span` slots if the cache grows."""
        for layer in self.layers if self.grows else ():
            layer.reserve(span)

    def clear(self, slots: int) -> None:
        """Make the first slots of all rows zero again."""
        for layer in self.layers:
            for stored in layer.tensors():
                stored[:, :, :slots].zero_()

    def drop(self) -> None:
        """Free the memory until `allocate`, which makes everything zero."""
        for layer in self._all_layers:
            layer.drop()

    def allocate(self) -> None:
        """Undo `drop`."""
        for layer in self._all_layers:
            layer.allocate()

    def tensors(self) -> list[Tensor]:
        """All layers' keys and values; none before the first pass."""
        return [stored for layer in self._all_layers for stored in layer.tensors()]

    def tensors_of_layer(self, index: int) -> list[Tensor]:
        """The part of `tensors` that one layer of the model reads."""
        return [stored for layer in self._all_layers[index :: len(self.layers)] for stored in layer.tensors()]

    def swap(self, places: Sequence[int], others: Sequence[int], span: int) -> None:
        """Exchange the rows in `places` with those in `others`, pair by pair, in the first `span` slots."""
        into, taken = [*places, *others], [*others, *places]
        for layer in self.layers:
            for stored in layer.tensors():
                stored[into, :, :span] = stored[taken, :, :span]

    def as_dynamic(self, config: PreTrainedConfig, length: int, places: Sequence[int]) -> Cache:
        """The first `length` tokens of the rows in `places` as a cache of transformers."""
        dynamic = DynamicCache(config=config.get_text_config(decoder=True))
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:  # never for layers that share another layer's keys
                dynamic.update(layer.keys[places, :, :length], layer.values[places, :, :length], index)
        if self.cross is None:
            return dynamic
        encoding = DynamicCache()
        for index, layer in enumerate(self.cross.layers):
            encoding.update(layer.keys[places], layer.values[places], index)
        return EncoderDecoderCache(dynamic, encoding)
