"""Additive 4-D attention masks from precomputed tables.

transformers passes such masks on unchanged. Otherwise it builds boolean masks in each pass, and every layer converts
them to numbers: together 3% of a small model's verification pass.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specdec.compat.transformers_private import attention_name, compiles_whole

ATTENTION = ("eager", "sdpa")
# The widest pass that is recorded, or has its masks in a table. Only prompts and drafts that catch up are wider.
MAX_MASKED_TOKENS = 32
# Memory-efficient attention on CUDA loads this many numbers of a mask at a time. torch checks only the strides.
ALIGNMENT = 8
Masks = Tensor | dict[str, Tensor] | None  # one mask, or one per kind of layer, as the model expects
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def takes_4d_masks(model: PreTrainedModel) -> bool:
    """Whether a model accepts 4-D masks and they alone determine which keys a query sees.

    Encoder-decoder models don't, nor models with ALiBi (BLOOM), which compute positions from a 2-D mask. For the
    others, transformers' flag for static caches decides.
    """
    config = model.config.get_text_config(decoder=True)
    return (
        not model.config.is_encoder_decoder
        and compiles_whole(model)
        and {"attention_mask", "position_ids"} <= inspect.signature(model.forward).parameters.keys()
        and not getattr(config, "alibi", False)
        and attention_name(config) in ATTENTION
        and LAYER_TYPES.issuperset(getattr(config, "layer_types", None) or ())
    )


def check_attention(config: PreTrainedConfig, named: str, *, otherwise: str = "") -> None:
    """Refuse an attention that does not support additive masks.

    Args:
        named: the argument and the model, for the message.
        otherwise: a further way out.

    Raises:
        ValueError: names the implementation, and those that support them.
    """
    if (attention := attention_name(config)) not in ATTENTION:
        raise ValueError(
            f"{named}: attn_implementation={attention!r} doesn't support rows of different lengths: choose one of "
            f"{', '.join(map(repr, ATTENTION))}{otherwise}."
        )


def takes_one_causal_mask(model: PreTrainedModel) -> bool:
    """Whether a model accepts 4-D masks and has no sliding windows, so that one causal mask serves all layers."""
    return takes_4d_masks(model) and not any(attention_windows(model.config).values())


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """The window of each kind of layer: the number of last tokens that a query sees, including itself; None for all."""
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        return {"full_attention": window}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(types))}


def attention_mask(slots: Tensor, visible: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """The additive mask `[B, 1, k, span]` of queries in `slots` `[B, k]` over the slots of `visible` `[B, span]`.

    A query sees the visible slots within its window up to its own. It always sees itself, even as padding, so that
    no softmax is empty.
    """
    keys = torch.arange(visible.shape[1], device=slots.device)
    distance = slots.unsqueeze(2) - keys
    seen = (distance >= 0) & visible.unsqueeze(1)
    if window is not None:
        seen &= distance < window
    hidden = ~(seen | (distance == 0))
    mask = torch.zeros(hidden.shape, dtype=dtype, device=slots.device)
    return mask.masked_fill(hidden, torch.finfo(dtype).min).unsqueeze(1)


class CausalMasks:
    """Masks of rows without padding that have the same length: views of one table per width.

    Args:
        capacity: the most slots of a row.
        window: as in `attention_mask`.
        dtype, device: of the model's hidden states.
    """

    def __init__(self, capacity: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._capacity, self._window, self._dtype, self._device = capacity, window, dtype, device
        self._tables: dict[int, Tensor] = {}

    def of_last(self, width: int, slots: int) -> Tensor:
        """`[1, 1, width, slots]`: queries in the last `width` of `slots` slots."""
        if width > MAX_MASKED_TOKENS:
            return self._table(width, slots)
        if width not in self._tables:
            self._tables[width] = self._table(width, self._capacity + width)
        mask = self._tables[width][..., -slots:]
        if self._device.type != "cpu" and mask.storage_offset() % ALIGNMENT:
            mask = mask.clone(memory_format=torch.contiguous_format)
        return mask

    def _table(self, width: int, slots: int) -> Tensor:
        ends = torch.arange(slots - width, slots, device=self._device).unsqueeze(0)
        visible = torch.ones(1, slots, dtype=torch.bool, device=self._device)
        return attention_mask(ends, visible, self._window, self._dtype)


class SlotMasks:
    """Masks of rows with different lengths: each query's mask is a section of one precomputed line.

    They equal `attention_mask` with a third of its operations, except that queries in padding may see nothing.

    Args:
        capacity: slots of a row.
        window: as in `attention_mask`.
        dtype, device: of the model's hidden states.
    """

    def __init__(self, capacity: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._last = capacity - 1
        self._hidden = torch.finfo(dtype).min
        self._line = torch.full((2 * capacity,), self._hidden, dtype=dtype, device=device)
        self._line[max(capacity - (window or capacity), 0) : capacity] = 0

    def of(self, slots: Tensor, span: int, visible: Tensor | None) -> Tensor:
        """`[B, 1, k, span]`, for queries in `slots` `[B, k]`; `visible` is `[B, span]`, or None for all slots."""
        mask = self._line.unfold(0, span, 1)[self._last - slots]
        if visible is not None:
            mask = mask.masked_fill(~visible.unsqueeze(1), self._hidden)
        return mask.unsqueeze(1)


def slot_masks(slots: Tensor, visible: Tensor, windows: dict[str, int | None], dtype: torch.dtype) -> Masks:
    """4-D masks in the form that the model expects: one, or one per kind of layer; see `attention_mask`."""
    return by_kind({kind: attention_mask(slots, visible, window, dtype) for kind, window in windows.items()})


def by_kind(masks: dict[str, Tensor]) -> Masks:
    """Convert masks by kind of layer to the form that the model expects."""
    return masks if len(masks) > 1 else next(iter(masks.values()))
