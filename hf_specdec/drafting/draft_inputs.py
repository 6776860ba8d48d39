"""The inputs of the draft model: the target's inputs that it accepts, on the draft's device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_specdec.compat.transformers_private import encoded_pictures
from hf_specdec.models.cache_names import CACHE_NAMES, cache_argument
from hf_specdec.models.cache_rollback import new_cache

NOT_SHARED = (
    *CACHE_NAMES,
    "encoder_outputs",
    "inputs_embeds",
    "logits_to_keep",
    "attention_mask",
    "decoder_attention_mask",
)


def draft_inputs(
    draft: PreTrainedModel,
    model_kwargs: dict[str, Any],
    input_ids: Tensor,
    inputs_tensor: Tensor | None,
    media: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The draft's `model_kwargs`, with its own empty cache.

    An encoder-decoder draft runs its own encoder here, on the inputs before `num_return_sequences` expands them. A
    decoder-only draft for an encoder-decoder target, such as Distil-Whisper's, reads the target's encoder output; so
    does one whose configuration says `draft_shares_encoder`, as the drafts of `--task draft` do.

    Args:
        draft: the draft model.
        model_kwargs: the arguments that `generate` prepared for the target.
        input_ids: `[B, P]`, the prompts (of the decoder).
        inputs_tensor: `[B / num_return_sequences, ...]`, the encoder's inputs.
        media: pictures and video before the target encoded them and `num_return_sequences` expanded them.

    Raises:
        ValueError: the draft's cache cannot be rolled back, or the draft's encoder has no inputs.
    """
    accepted = {*inspect.signature(draft.forward).parameters}
    if "kwargs" in accepted:
        accepted.add("use_cache")  # LLaVA passes it on to its text model
    shared = {key: value for key, value in model_kwargs.items() if key in accepted and key not in NOT_SHARED}
    kwargs = {key: _to_draft(value, draft) for key, value in shared.items()}
    encoded = "encoder_outputs" in model_kwargs
    if encoded:
        own_encoder = draft.config.is_encoder_decoder and not getattr(draft.config, "draft_shares_encoder", False)
        kwargs["encoder_outputs"] = (
            _encode(draft, model_kwargs, input_ids, inputs_tensor)
            if own_encoder
            else _to_draft(_readable(model_kwargs["encoder_outputs"], draft), draft)
        )
        masks = ["attention_mask", "decoder_attention_mask"] if draft.config.is_encoder_decoder else []
    else:
        masks = ["attention_mask"]
    if kwargs.get("mm_encoder_outputs"):
        kwargs["mm_encoder_outputs"] = _encoded_media(
            draft, kwargs["mm_encoder_outputs"], input_ids, inputs_tensor, media
        )
    for key in masks:
        if model_kwargs.get(key) is not None:
            kwargs[key] = model_kwargs[key].to(draft.device)
    mask = kwargs.get("attention_mask")
    if not encoded and mask is not None and mask.shape[1] > input_ids.shape[1]:
        # The target's cache was passed filled, with text that the draft has not read.
        kwargs["attention_mask"] = mask[:, -input_ids.shape[1] :]
        kwargs.pop("position_ids", None)
    positions = kwargs.get("position_ids")
    if positions is not None and positions.dim() > 2 and "pixel_values" not in accepted:
        kwargs.pop("position_ids")  # positions in a picture, which do not apply to a text-only draft
    if kwargs.get("use_cache"):
        kwargs[cache_argument(draft)] = new_cache(draft, "assistant_model", cross_attention=encoded)
    return kwargs


def source_tokens(model_kwargs: dict[str, Any], input_ids: Tensor, inputs_tensor: Tensor | None) -> Tensor | None:
    """The encoder's input ids `[B, S]`, repeated to the rows of `input_ids`; None if it reads no tokens."""
    if "encoder_outputs" not in model_kwargs or inputs_tensor is None or torch.is_floating_point(inputs_tensor):
        return None
    return inputs_tensor.repeat_interleave(len(input_ids) // len(inputs_tensor), 0)


def _encode(
    draft: PreTrainedModel, model_kwargs: dict[str, Any], input_ids: Tensor, inputs_tensor: Tensor | None
) -> ModelOutput:
    """The draft's encoding of the unexpanded inputs, repeated to one row per row of `input_ids`."""
    # `generate` fills in ids of -100 if only encoder_outputs were passed.
    if inputs_tensor is None or bool((inputs_tensor == -100).all()):
        raise ValueError(
            "encoder_outputs without inputs: the draft must run its own encoder, so pass input_ids (or "
            "input_features) instead of encoder_outputs."
        )
    if draft.main_input_name == "input_ids" and torch.is_floating_point(inputs_tensor):
        raise ValueError(
            f"inputs_embeds: assistant_model={type(draft).__name__} can't read the target's embeddings, so pass "
            "input_ids instead, or choose drafter='suffix'."
        )
    copies = len(input_ids) // len(inputs_tensor)
    encoder = draft.get_encoder()
    parameters = inspect.signature(encoder.forward).parameters
    # Boxes and masks of the encoder's inputs are among the target's arguments, expanded.
    shared = {key: value for key, value in model_kwargs.items() if key in parameters and isinstance(value, Tensor)}
    inputs = {key: _to_draft(value[::copies], draft) for key, value in shared.items()}
    # An encoder of another kind has another name for them.
    name = draft.main_input_name if draft.main_input_name in parameters else encoder.main_input_name
    inputs[name] = _to_draft(inputs_tensor, draft)
    try:
        encoding = encoder(**inputs, return_dict=True)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not torch.is_floating_point(inputs_tensor):
            raise
        raise ValueError(
            f"assistant_model={type(draft).__name__} can't read the target's {draft.main_input_name} of the shape "
            f"{list(inputs_tensor.shape)} ({str(error).splitlines()[0]}): choose a draft with the target's inputs (for "
            "Whisper, equal mel bins and window), or one that reads its encoding, such as Distil-Whisper."
        ) from error
    return type(encoding)(
        **{key: value.repeat_interleave(copies, 0) for key, value in encoding.items() if isinstance(value, Tensor)}
    )


def _readable(encoding: ModelOutput, draft: PreTrainedModel) -> ModelOutput:
    """The target's encoding for a decoder-only draft.

    Raises:
        ValueError: its width is not the one that the draft reads.
    """
    config, found = draft.config.get_text_config(decoder=True), encoding[0].shape[-1]
    expected = getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
    if found != expected:
        raise ValueError(
            f"assistant_model={type(draft).__name__} reads encodings of {expected} numbers per position, and the "
            f"target's have {found}: choose a draft made for this target, or one with its own encoder."
        )
    return encoding


def _encoded_media(
    draft: PreTrainedModel,
    by_target: Mapping[str, Any],
    input_ids: Tensor,
    inputs_tensor: Tensor | None,
    media: Mapping[str, Any],
) -> Any:
    """The draft's encoding of pictures; the target's if only that is available and the widths agree."""
    if not media or "mm_encoder_outputs" in media:
        width = draft.config.get_text_config(decoder=True).hidden_size
        found = next(
            (t.shape[-1] for t in _tensors(getattr(next(iter(by_target.values())), "pooler_output", None))), width
        )
        if found != width:
            raise ValueError(
                f"assistant_model={type(draft).__name__} can't read pictures that the target has encoded, {found} wide "
                f"instead of {width}: pass the pictures, and call generate under hf_specdec.enable(...) or with "
                "SpeculativeDecoding(draft, media={'pixel_values': ...})."
            )
        return by_target
    copies = 1 if inputs_tensor is None else len(input_ids) // len(inputs_tensor)
    own = {key: _to_draft(media[key], draft) for key in media}
    return encoded_pictures(draft, own, input_ids[::copies].to(draft.device), copies)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a tensor, or in a list of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (item for item in value if isinstance(item, Tensor))


def _to_draft(value: Any, draft: PreTrainedModel) -> Any:
    """Move tensors to the draft's device, and floating-point ones to its dtype."""
    if isinstance(value, ModelOutput):
        return type(value)(**{key: _to_draft(field, draft) for key, field in value.items()})
    if isinstance(value, Mapping):
        return {key: _to_draft(item, draft) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_draft(item, draft) for item in value)
    if isinstance(value, Tensor):
        return value.to(draft.device, draft.dtype if torch.is_floating_point(value) else value.dtype)
    return value
