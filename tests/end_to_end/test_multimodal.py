"""Targets that read pictures: greedy speculation gives plain `generate`'s tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.recurrent_families import noisy
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import hf_specdec

PICTURE, START, END = 40, 42, 43
TEXT: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "embed_tokens" in name else 0.4)
    return model.double().eval()


def _inputs(batch_size: int, **more: Tensor) -> dict[str, Tensor]:
    """A picture of four places in a text, for each row."""
    ids = torch.tensor([[5, 6, START, *[PICTURE] * 4, END, 7, 8, 9]]).repeat(batch_size, 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def _llava(batch_size: int) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    vision = CLIPVisionConfig(**VISION, image_size=8, patch_size=4, projection_dim=16)
    config = LlavaConfig(text_config=LlamaConfig(**TEXT), vision_config=vision, image_token_id=PICTURE)
    pictures = torch.randn(batch_size, 3, 8, 8, dtype=torch.float64)
    return LlavaForConditionalGeneration(config), _inputs(batch_size, pixel_values=pictures)


def _qwen2_vl(batch_size: int) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "in_channels": 3}
    config = Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=PICTURE,
        video_token_id=41,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    inputs = _inputs(batch_size, image_grid_thw=torch.tensor([[1, 4, 4]] * batch_size))
    inputs["pixel_values"] = torch.randn(16 * batch_size, 96, dtype=torch.float64)
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == PICTURE).long()
    return Qwen2VLForConditionalGeneration(config), inputs


def _gemma3(batch_size: int) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    config = Gemma3Config(
        text_config={**TEXT, "head_dim": 16, "sliding_window": 8},
        vision_config={**VISION, "image_size": 8, "patch_size": 2, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=PICTURE,
        boi_token_index=START,
        eoi_token_index=END,
        tie_word_embeddings=False,
    )
    inputs = _inputs(batch_size, pixel_values=torch.randn(batch_size, 3, 8, 8, dtype=torch.float64))
    inputs["token_type_ids"] = (inputs["input_ids"] == PICTURE).long()
    return Gemma3ForConditionalGeneration(config), inputs


TARGETS: dict[str, Callable[[int], tuple[PreTrainedModel, dict[str, Tensor]]]] = {
    "llava": _llava,
    "qwen2-vl": _qwen2_vl,
    "gemma3": _gemma3,
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", TARGETS)
def test_pictures_reach_the_first_pass_and_positions_go_on_after_them(kind: str, batch_size: int) -> None:
    torch.manual_seed(3)
    made, inputs = TARGETS[kind](batch_size)
    target = _ready(made)
    text_only = _ready(LlamaForCausalLM(LlamaConfig(**TEXT)))
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    plain = target.generate(**inputs, **settings)
    drafts = {"same kind": noisy(target, 0.02), "text only": text_only, "look-up": None}
    for name, draft in drafts.items():
        drafter = {"drafter": "lookup"} if draft is None else {"assistant_model": draft}
        with hf_specdec.enable(target, generation_strategy="speculative", **drafter):
            out = target.generate(**inputs, **settings, num_assistant_tokens=4, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain), name
        if name == "same kind":
            assert out.speculation.acceptance_rate > 0
    without = {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}
    assert not torch.equal(target.generate(**without, **settings), plain), "the text depends on the picture"
