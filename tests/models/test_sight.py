"""Passes whose tokens see later ones: such prompts are read without drafts, and models of no other passes refused."""

from typing import Any

import pytest
import torch
import transformers
from helpers.class_inputs import text_inputs
from helpers.generating_classes import small_pair
from helpers.identity import same_as_plain
from helpers.models import Passes, llama, prompts
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel, LogitsProcessor, PreTrainedModel

from hf_specdec.models import dynamic_runner, sight

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


def _encoder() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    return BertLMHeadModel(BertConfig(vocab_size=64, **sizes)).double().eval()


def _pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    return small_pair(getattr(transformers, name), torch.float64)


def _speculated(target: PreTrainedModel, draft: PreTrainedModel | None, inputs: dict[str, Tensor], **call: Any) -> Any:
    drafter = {"drafter": "suffix"} if draft is None else {}
    return same_as_plain(target, draft, inputs, GREEDY | call, num_assistant_tokens=4, **drafter)


@pytest.mark.parametrize("as_draft", [False, True])
def test_an_encoder_is_refused_by_name(as_draft: bool) -> None:
    """BERT without `is_decoder` generates, too, if one only warns; each token sees all of its pass."""
    bert = _encoder()
    target = llama() if as_draft else bert
    argument = "assistant_model" if as_draft else "model"
    words = rf"{argument}=BertLMHeadModel.*is_decoder=True.*decode without"
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            _speculated(target, bert if as_draft else None, prompts(1))


@pytest.mark.parametrize("name", ["PaliGemmaForConditionalGeneration", "HrmTextForCausalLM"])
@pytest.mark.parametrize("types", [0, 1, None])
def test_a_prompt_that_sees_both_ways_is_read_without_drafts(name: str, types: int | None) -> None:
    """With types for which it does, with types for which it does not, and with none."""
    target, draft = _pair(name)
    inputs = text_inputs(target, 3)
    if types is not None:
        inputs["token_type_ids"] = torch.full_like(inputs["input_ids"], types)
    for drafting in (draft, target, None):
        out = _speculated(target, drafting, inputs)
        if drafting is target:
            assert out.speculation.acceptance_rate == 1.0, "the draft reads the prompt alone as well"
        if types is not None or name.startswith("PaliGemma"):
            assert not any(out.speculation.rounds[0].drafted)


@pytest.mark.parametrize(("name", "types"), [("PaliGemmaForConditionalGeneration", 0), ("HrmTextForCausalLM", 1)])
def test_without_a_cache_every_pass_reads_the_prompt(name: str, types: int) -> None:
    target, draft = _pair(name)
    inputs = text_inputs(target, 1)
    causal = {**inputs, "token_type_ids": torch.full_like(inputs["input_ids"], 1 - types)}
    _speculated(target, draft, causal, use_cache=False)
    both_ways = {**inputs, "token_type_ids": torch.full_like(inputs["input_ids"], types)}
    with pytest.raises(ValueError, match=f"model={name}.*use_cache=True"):
        _speculated(target, None, both_ways, use_cache=False)


def test_models_are_tried_once() -> None:
    target = _pair("TrOCRForCausalLM")[0]
    with Passes(target) as passes:
        _speculated(target, None, prompts(1))
        first = passes.count
        _speculated(target, None, prompts(1))
        assert first == (passes.count - first) + 4, "two prompts, and two passes after one of them"


def test_models_marked_as_causal_are_not_tried(monkeypatch) -> None:
    monkeypatch.setattr(sight, "_try", None)
    for target in (llama(), _pair("T5ForConditionalGeneration")[0]):
        _speculated(target, None, text_inputs(target, 1))


class _Padding(LogitsProcessor):
    """Padding is the likeliest token after some others."""

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bonus = torch.zeros_like(scores)
        last = input_ids[:, -1]
        bonus[:, self.padding] = ((last % 3 == 2) & (last != self.padding)) * 1e3
        return scores + bonus


@pytest.mark.parametrize("name", ["Kosmos2_5ForConditionalGeneration", "M2M100ForConditionalGeneration"])
def test_padding_that_is_generated_takes_a_place_in_the_next_pass_only(name: str) -> None:
    target, draft = _pair(name)
    inputs = text_inputs(target, 3)
    padding = dynamic_runner.padding_without_position(target)
    call = {"logits_processor": [_Padding(padding)]}
    for drafting in (draft, target, None):
        out = _speculated(target, drafting, inputs, **call)
        assert (out.sequences[:, -12:-1] == padding).any()


def test_control_positions_counted_within_a_pass_give_other_tokens(monkeypatch) -> None:
    target, _ = _pair("Kosmos2_5ForConditionalGeneration")
    inputs = text_inputs(target, 1)
    call = {"logits_processor": [_Padding(dynamic_runner.padding_without_position(target))]}
    monkeypatch.setattr(dynamic_runner, "padding_without_position", lambda _: None)
    with pytest.raises(AssertionError):
        _speculated(target, target, inputs, **call)
