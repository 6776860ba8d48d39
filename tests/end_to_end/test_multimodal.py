"""Targets that read pictures: greedy speculation gives plain `generate`'s tokens."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from helpers.identity import same_as_plain, speculated
from helpers.patches import returned
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
    LogitsProcessor,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from hf_specdec import SpeculativeDecoding
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.models import dynamic_runner

PICTURE, START, END = 40, 42, 43
TEXT: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "embed_tokens" in name else 0.4)
    return model.double().eval()


def _inputs(batch_size: int, **more: Tensor) -> dict[str, Tensor]:
    """A picture of four places in a text, for each row; the texts before it differ in length, padded on the left."""
    ids = torch.tensor([[5, 6, START, *[PICTURE] * 4, END, 7, 8, 9]]).repeat(batch_size, 1)
    mask = (torch.arange(ids.shape[1]) >= torch.arange(batch_size)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, **more}


def _llava(batch_size: int, text: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    vision = CLIPVisionConfig(**VISION, image_size=8, patch_size=4, projection_dim=16)
    config = LlavaConfig(text_config=LlamaConfig(**text), vision_config=vision, image_token_id=PICTURE)
    pictures = torch.randn(batch_size, 3, 8, 8, dtype=torch.float64)
    return LlavaForConditionalGeneration(config), _inputs(batch_size, pixel_values=pictures)


def _qwen_inputs(batch_size: int) -> dict[str, Tensor]:
    inputs = _inputs(batch_size, image_grid_thw=torch.tensor([[1, 4, 4]] * batch_size))
    inputs["pixel_values"] = torch.randn(16 * batch_size, 96, dtype=torch.float64)
    return inputs | {"mm_token_type_ids": (inputs["input_ids"] == PICTURE).long()}


def _qwen_config(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    tokens = {"image_token_id": PICTURE, "video_token_id": 41, "vision_start_token_id": START}
    vision = {"num_heads": 2, "patch_size": 4, "in_channels": 3, **vision}
    return {
        "text_config": {**text, "rope_parameters": rope},
        "vision_config": vision,
        "vision_end_token_id": END,
        **tokens,
    }


def _qwen2_vl(batch_size: int, text: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": text["hidden_size"]}
    config = Qwen2VLConfig(**_qwen_config(text, vision))
    return Qwen2VLForConditionalGeneration(config), _qwen_inputs(batch_size)


def _qwen2_5_vl(batch_size: int, text: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": text["hidden_size"], "intermediate_size": 16}
    vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(**_qwen_config(text, vision))
    return Qwen2_5_VLForConditionalGeneration(config), _qwen_inputs(batch_size)


def _gemma3(batch_size: int, text: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    config = Gemma3Config(
        text_config={**text, "head_dim": 16, "sliding_window": 8},
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


def _idefics(family: str, batch_size: int, text: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    config = getattr(transformers, f"{family}Config")(
        text_config={**text, "model_type": "llama"},
        vision_config={**VISION, "image_size": 8, "patch_size": 2},
        image_token_id=PICTURE,
        scale_factor=2,
        pad_token_id=0,
    )
    inputs = _inputs(batch_size, pixel_values=torch.randn(batch_size, 1, 3, 8, 8, dtype=torch.float64))
    return getattr(transformers, f"{family}ForConditionalGeneration")(config), inputs


TARGETS: dict[str, Callable[..., tuple[PreTrainedModel, dict[str, Tensor]]]] = {
    "llava": _llava,
    "qwen2-vl": _qwen2_vl,
    "qwen2.5-vl": _qwen2_5_vl,
    "gemma3": _gemma3,
    "idefics3": partial(_idefics, "Idefics3"),
    "smolvlm": partial(_idefics, "SmolVLM"),
}
NARROW = {**TEXT, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
SETTINGS = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}


def _made(kind: str, batch_size: int, text: dict[str, Any] = TEXT) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    torch.manual_seed(3)
    model, inputs = TARGETS[kind](batch_size, text)
    return _ready(model), inputs


def _speculate(target: PreTrainedModel, draft: PreTrainedModel | None, inputs: dict[str, Tensor], **more: Any) -> Any:
    """The output, with a draft or with look-up."""
    drafter = {"drafter": "suffix"} if draft is None else {}
    return same_as_plain(target, draft, inputs, {**SETTINGS, **more}, num_assistant_tokens=4, **drafter)


@pytest.mark.parametrize(("kind", "batch_size"), [*((kind, 3) for kind in TARGETS), ("qwen2-vl", 1)])
def test_pictures_reach_the_first_pass_and_positions_go_on_after_them(kind: str, batch_size: int) -> None:
    target, inputs = _made(kind, batch_size)
    text_only = _ready(LlamaForCausalLM(LlamaConfig(**TEXT)))
    drafts = {
        "same kind": noisy(target, 0.02),
        "same kind, narrower": _made(kind, batch_size, NARROW)[0],
        "text only": text_only,
        "look-up": None,
    }
    for name, draft in drafts.items():
        out = _speculate(target, draft, inputs)
        assert not any(out.speculation.rounds[0].drafted), "a drafted placeholder would count as part of a picture"
        if name == "same kind":
            assert out.speculation.acceptance_rate > 0
    other = {**inputs, "pixel_values": -inputs["pixel_values"]}
    assert not torch.equal(target.generate(**other, **SETTINGS), out.sequences), "the text depends on the picture"


@pytest.mark.parametrize("kind", ["qwen2-vl", "qwen2.5-vl"])
def test_control_positions_counted_by_tokens_give_another_text(kind: str, monkeypatch) -> None:
    """A picture of four places takes two positions, so that text behind it has lower ones than its place says."""

    def by_tokens(positions: Tensor, total: int) -> Tensor:
        later = torch.arange(positions.shape[-1], total).expand(*positions.shape[:-1], -1)
        return torch.cat([positions, later], dim=-1)

    monkeypatch.setattr(dynamic_runner, "extend_count", by_tokens)
    target, inputs = _made(kind, 1)
    with pytest.raises(AssertionError):
        _speculate(target, None, inputs)


class _Placeholder(LogitsProcessor):
    """Makes a picture's placeholder the first new token, and likely ever after."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, PICTURE] += 1e4 if input_ids.shape[1] == 11 else 8.0
        return scores


@pytest.mark.parametrize("kind", TARGETS)
def test_placeholders_that_are_drafted_or_generated_belong_to_no_picture(kind: str) -> None:
    target, inputs = _made(kind, 3)
    for draft in (noisy(target, 0.02), _ready(LlamaForCausalLM(LlamaConfig(**TEXT)))):
        out = _speculate(target, draft, inputs, logits_processor=[_Placeholder()])
        assert (out.sequences[:, 11:] == PICTURE).sum(1).min() > 1


@pytest.mark.parametrize("kind", ["llava", "qwen2-vl"])
def test_a_prompt_that_begins_with_a_picture(kind: str) -> None:
    target, inputs = _made(kind, 1)
    cut = {key: value[:, 3:] for key, value in inputs.items() if value.shape[-1] == 11}
    inputs = {**inputs, **cut}
    for draft in (noisy(target, 0.02), _ready(LlamaForCausalLM(LlamaConfig(**TEXT))), None):
        _speculate(target, draft, inputs)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_target_as_its_own_draft_accepts_everything(kind: str) -> None:
    """So the draft reads the pictures, at the right places, and keeps what it has read."""
    target, inputs = _made(kind, 2)
    assert _speculate(target, target, inputs).speculation.acceptance_rate == 1.0


def test_a_draft_of_the_same_kind_looks_at_the_picture_itself() -> None:
    """It is the target with another projection of pictures, so that less is accepted than of the target's drafts."""
    target, inputs = _made("llava", 2)
    blind = copy.deepcopy(target)
    with torch.no_grad():
        blind.get_submodule("model.multi_modal_projector").linear_2.weight.mul_(-5)
    assert _speculate(target, blind, inputs).speculation.acceptance_rate < 1.0


def test_a_text_only_draft_reads_the_text_alone(monkeypatch) -> None:
    """It drafts what it would write after each row's text without placeholders, which alone fits into its context."""
    target = _made("llava", 1)[0]
    draft = _ready(LlamaForCausalLM(LlamaConfig(**{**TEXT, "max_position_embeddings": 28})))
    picture = [START, *[PICTURE] * 4, END]
    rows = [[5, 6, *picture, 7, *picture, 8, 9], [*[0] * 7, 5, *picture, 10, 11, 12]]
    mask = torch.tensor([[1] * 17, [0] * 7 + [1] * 10])
    pictures = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    inputs = {"input_ids": torch.tensor(rows), "attention_mask": mask, "pixel_values": pictures}
    rounds = returned(
        monkeypatch,
        ModelDrafter,
        "propose",
        lambda made, self, ids, lengths, room: ([row[:n].tolist() for row, n in zip(ids, lengths, strict=True)], made),
    )
    _speculate(target, draft, inputs)
    longest = 0
    for texts, made in rounds:
        for row, (text, count) in enumerate(zip(texts, made.lengths, strict=True)):
            seen = [token for token, shown in zip(text[:17], mask[row], strict=True) if shown and token != PICTURE]
            alone = torch.tensor([seen + text[17:]])
            if count:
                expected = draft.generate(alone, **{**SETTINGS, "max_new_tokens": count})
                assert made.tokens[row, :count].tolist() == expected[0, alone.shape[1] :].tolist()
                longest = max(longest, len(text))
    assert longest > 28, "the draft's context does not hold the placeholders"


def test_returned_sequences_share_a_picture() -> None:
    target, inputs = _made("llava", 2)
    out = speculated(
        target, target, **inputs, max_new_tokens=8, do_sample=True, num_return_sequences=2, return_dict_in_generate=True
    )
    assert out.sequences.shape[0] == 4
    assert out.speculation.acceptance_rate > 0.99, "its draft, the target itself, saw the same pictures"


def test_pictures_that_only_the_target_could_encode_are_refused_by_name() -> None:
    target, inputs = _made("llava", 1)
    narrow = _made("llava", 1, NARROW)[0]
    # Older versions of transformers encode pictures in the first pass, each model its own.
    encodes = hasattr(target, "_prepare_multimodal_encoder_kwargs_for_generation")
    words = r"assistant_model=LlavaFor.* 32 wide instead of 16: pass the pictures"
    with pytest.raises(ValueError, match=words) if encodes else nullcontext():
        target.generate(**inputs, **SETTINGS, custom_generate=SpeculativeDecoding(narrow))
    media = {"pixel_values": inputs["pixel_values"]}
    ours = target.generate(**inputs, **SETTINGS, custom_generate=SpeculativeDecoding(narrow, media=media))
    assert torch.equal(ours, target.generate(**inputs, **SETTINGS))
