"""Inputs for any generating class: text, pictures or sound, in the first form that it accepts."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from helpers.small_configs import EOS, FIRST_SPECIAL, PAD, WIDTH

Inputs = dict[str, Tensor]
LENGTH = 11
PLACEHOLDERS = re.compile(r"tokens: \d+, features:? (\d+)")


def text_inputs(model: PreTrainedModel, batch_size: int) -> Inputs:
    """Prompts of text alone that differ in length: of an encoder padded on the right, of a decoder on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(EOS + 1, FIRST_SPECIAL, (batch_size, LENGTH), generator=generator)
    short = torch.arange(LENGTH) < 2 * torch.arange(batch_size)[:, None]
    mask = (~(short.flip(1) if model.config.is_encoder_decoder else short)).long()
    boxes = (
        {"bbox": torch.zeros(batch_size, LENGTH, 4)} if "bbox" in inspect.signature(model.forward).parameters else {}
    )
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask, **boxes}


def accepted_inputs(
    model: PreTrainedModel, batch_size: int, plain: Callable[[PreTrainedModel, Inputs], Tensor]
) -> dict[str, Inputs]:
    """What a class accepts, by kind: the text, or what it reads instead, and a text with a picture.

    Args:
        plain: decodes; raises an exception if the inputs are not those of the class.
    """
    main = model.main_input_name
    forms = [text_inputs] if main == "input_ids" else MAIN_INPUTS.get(main, [])
    accepted = {}
    errors: list[Exception] = []
    for form in forms:
        try:
            inputs = form(model, batch_size)
            plain(model, inputs)
        except Exception as error:
            errors.append(error)
            continue
        accepted[main] = inputs
        break
    if main == "input_ids" and "pixel_values" in inspect.signature(model.forward).parameters:
        accepted |= _with_pictures(model, batch_size, plain)
    if not accepted:
        raise errors[0] if errors else ValueError(f"no inputs are known for {main}")
    return accepted


def _with_pictures(
    model: PreTrainedModel, batch_size: int, plain: Callable[[PreTrainedModel, Inputs], Tensor]
) -> dict[str, Inputs]:
    """A text with a picture, in the first form that a class accepts and looks at; empty if there is none."""
    for form in PICTURES:
        for inputs in _with_enough_places(form, model, batch_size, plain):
            other = {**inputs, "pixel_values": -inputs["pixel_values"]}
            if not torch.equal(plain(model, inputs), plain(model, other)):
                return {"picture": inputs}
    return {}


def _with_enough_places(
    form: Callable[[PreTrainedModel, int], Inputs],
    model: PreTrainedModel,
    batch_size: int,
    plain: Callable[[PreTrainedModel, Inputs], Tensor],
) -> Iterator[Inputs]:
    """The inputs of a form, in a text with as many placeholders as the class says that the picture needs."""
    tried = [4]
    for places in tried:
        try:
            inputs = {**form(model, batch_size), **_text_around(model, batch_size, places)}
            plain(model, inputs)
        except Exception as error:
            if needed := PLACEHOLDERS.search(str(error)):
                each = int(needed[1]) // batch_size  # tokens, or numbers
                tried += [n for n in (each, each // WIDTH) if n not in tried]
        else:
            yield inputs
            return


def _text_around(model: PreTrainedModel, batch_size: int, places: int) -> Inputs:
    """A text with a picture's placeholders, after padding that differs by row."""
    text, parameters = text_inputs(model, batch_size), inspect.signature(model.forward).parameters
    mask, config = text["attention_mask"], model.config
    ids = {name: getattr(config, f"{name}_token_id", getattr(config, f"{name}_token_index", None)) for name in NAMES}
    picture = [ids["vision_start"], *[ids["image"]] * places, ids["vision_end"]]
    shown = torch.tensor([token for token in picture if isinstance(token, int)], dtype=torch.long).expand(
        batch_size, -1
    )
    at = LENGTH - 4
    placed = torch.cat([text["input_ids"][:, :at], shown, text["input_ids"][:, at:]], dim=1)
    made = {
        "input_ids": placed,
        "attention_mask": torch.cat([mask[:, :at], torch.ones_like(shown), mask[:, at:]], dim=1),
    }
    types = (placed == (-1 if ids["image"] is None else ids["image"])).long()
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in parameters and model.config.model_type != "hrm_text":
            made[name] = types
    if "cross_attention_mask" in parameters:
        made["cross_attention_mask"] = torch.ones(*placed.shape, 1, config.vision_config.max_num_tiles)
    if "image_attention_mask" in parameters:
        made["image_attention_mask"] = torch.ones(*placed.shape, 1, dtype=torch.long)
    return made


NAMES = ("image", "vision_start", "vision_end")


def _vision(model: PreTrainedModel) -> PreTrainedConfig:
    config = model.config
    parts = (getattr(config, name, None) for name in ("vision_config", "encoder", "vq_config"))
    return next((part for part in parts if part is not None), config)


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _pixels(model: PreTrainedModel, *shape: int) -> Tensor:
    """Pictures `[*shape, C, height, width]`."""
    config = _vision(model)
    size = getattr(config, "image_size", None) or getattr(config, "resolution", None) or 32
    height, width = (size, size) if isinstance(size, int) else size
    return _noise(*shape, getattr(config, "num_channels", 3), height, width)


def _patches(model: PreTrainedModel, batch_size: int) -> Inputs:
    """Pictures of 4 by 4 patches, in rows of numbers."""
    config = _vision(model)
    patch, frames = config.patch_size, getattr(config, "temporal_patch_size", 1) or 1
    numbers = getattr(config, "in_channels", 3) * frames * patch * patch
    grid = torch.tensor([[1, 4, 4]] * batch_size)
    return {"pixel_values": _noise(16 * batch_size, numbers), "image_grid_thw": grid}


def _tiles(model: PreTrainedModel, batch_size: int) -> Inputs:
    """Pictures in tiles with their aspect ratios (mllama)."""
    tiles = _vision(model).max_num_tiles
    return {
        "pixel_values": _pixels(model, batch_size, 1, tiles),
        "aspect_ratio_ids": torch.ones(batch_size, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(batch_size, 1, tiles, dtype=torch.long),
    }


def _sized(model: PreTrainedModel, batch_size: int) -> Inputs:
    """A picture and its overview, with its size (LLaVA-NeXT)."""
    pixels = _pixels(model, batch_size, 2)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([list(pixels.shape[-2:])] * batch_size)}


def _one_sized(model: PreTrainedModel, batch_size: int) -> Inputs:
    pixels = _pixels(model, batch_size)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([list(pixels.shape[-2:])] * batch_size)}


PICTURES: tuple[Callable[[PreTrainedModel, int], Inputs], ...] = (
    _tiles,
    _patches,
    lambda model, batch_size: {"pixel_values": _pixels(model, batch_size)},
    lambda model, batch_size: {"pixel_values": _pixels(model, batch_size, 1)},
    _one_sized,
    _sized,
)


def _features(*shape: int, **more: Any) -> Callable[[PreTrainedModel, int], Inputs]:
    """Sound in the form of features; -1 in the shape: the number of the class."""

    def made(model: PreTrainedModel, batch_size: int) -> Inputs:
        config = model.config
        names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim")
        own = (
            getattr(part, name, None) for part in (config, getattr(config, "encoder_config", None)) for name in names
        )
        count = next((number for number in own if isinstance(number, int)), 80)
        return {"input_features": _noise(batch_size, *(count if n == -1 else n for n in shape))}

    return made


MAIN_INPUTS: dict[str, list[Callable[[PreTrainedModel, int], Inputs]]] = {
    "pixel_values": [lambda model, batch_size: {"pixel_values": _pixels(model, batch_size)}],
    "input_features": [_features(-1, n) for n in (32, 1024, 3000)] + [_features(n, -1) for n in (32, 128)],
    "input_values": [lambda model, batch_size: {"input_values": _noise(batch_size, 4000)}],
    "inputs": [lambda model, batch_size: {"inputs": _noise(batch_size, 4000)}],
    "flattened_patches": [
        lambda model, batch_size: {
            "flattened_patches": torch.cat(
                [
                    torch.ones(batch_size, 4, 2, dtype=torch.float64),
                    _noise(batch_size, 4, _vision(model).patch_embed_hidden_size),
                ],
                dim=-1,
            ),
            "attention_mask": torch.ones(batch_size, 4, dtype=torch.long),
        }
    ],
}
