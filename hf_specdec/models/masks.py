"""Additive 4-D attention masks, which transformers passes on unchanged, for rows of different lengths."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specdec.compat.transformers_private import attention_name, compiles_whole
from hf_specdec.models.traits import text_prefix

ATTENTION = ("eager", "sdpa")
Masks = Tensor | dict[str, Tensor] | None  # one mask, or one per kind of layer, as the model expects
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def takes_4d_masks(model: PreTrainedModel) -> bool:
    """Whether a model accepts 4-D masks and they alone determine which keys a query sees.

    Models with ALiBi (BLOOM) don't, which compute positions from a 2-D mask. For the others, transformers' flag for
    static caches decides.
    """
    config, prefix = model.config.get_text_config(decoder=True), text_prefix(model)
    return (
        compiles_whole(model)
        and {f"{prefix}attention_mask", f"{prefix}position_ids"} <= inspect.signature(model.forward).parameters.keys()
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


def attention_mask(
    slots: Tensor, span: int, window: int | None, dtype: torch.dtype, visible: Tensor | None = None
) -> Tensor:
    """The additive mask `[B, 1, k, span]` of queries in `slots` `[B, k]` over the first `span` slots.

    A query sees the visible slots within its window up to its own. It always sees itself, even as padding, so that
    no softmax is empty.

    Args:
        visible: `[B, span]`, the slots without padding; None for all.
    """
    keys, own = torch.arange(span, device=slots.device), slots.unsqueeze(2)
    hidden = keys > own
    if window is not None:
        hidden = hidden | (keys <= own - window)
    if visible is not None:
        hidden = hidden | (~visible.unsqueeze(1) & (keys != own))
    shown = torch.zeros((), dtype=dtype, device=slots.device)
    return shown.masked_fill(hidden, torch.finfo(dtype).min).unsqueeze(1)


def slot_masks(
    slots: Tensor, span: int, windows: dict[str, int | None], dtype: torch.dtype, visible: Tensor | None = None
) -> dict[str, Tensor]:
    """The masks by kind of layer; see `attention_mask`."""
    return {kind: attention_mask(slots, span, window, dtype, visible) for kind, window in windows.items()}


def by_kind(masks: dict[str, Tensor]) -> Masks:
    """Convert masks by kind of layer to the form that the model expects."""
    return masks if len(masks) > 1 else next(iter(masks.values()))
