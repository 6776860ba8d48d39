"""A few classes of the sweep (`make families`), one for each way in which passes can differ from the usual."""

import pytest
import transformers
from families.sweep import verdict
from packaging.version import Version

from hf_specdec.models import cache_rollback, runner_choice, sight

EQUAL = {
    "PaliGemmaForConditionalGeneration": "its prompt sees both ways",
    "MllamaForConditionalGeneration": "a picture's keys in layers of their own, and a mask for it along the text",
    "GitForCausalLM": "a picture's keys before the text",
    "IdeficsForVisionText2Text": "a mask for pictures along the text",
    "Kosmos2_5ForConditionalGeneration": "positions are counted by a pass's tokens, padding left out",
    "OpenAIGPTLMHeadModel": "no cache, and inputs of its own",
    "BertLMHeadModel": "causal as its configuration says, which no part of it does",
    "LlamaForCausalLM": "nothing",
}
REFUSED = {
    "XLMWithLMHeadModel": "it prepares tokens of the shape [1, 12]",
    "CpmAntForCausalLM": "it prepares tokens of the shape [1, 11]",
    "ProphetNetForCausalLM": "can't read two tokens in a pass",
    "FSMTForConditionalGeneration": "tokens see later ones",
    "HyperCLOVAXVisionV2ForConditionalGeneration": "pictures or sound for 3 rows of",  # positions are places
    "MoshiForCausalLM": "limits attention to 9 tokens by dropping others from its cache",
    "XLNetLMHeadModel": "by mems" if Version(transformers.__version__) >= Version("5.24") else "its own kind of cache",
}


def _verdict(name: str) -> str:
    return verdict(getattr(transformers, name))


@pytest.mark.parametrize("name", EQUAL)
def test_tokens_are_those_of_plain_generate(name: str) -> None:
    line = _verdict(name)
    assert line.startswith("equal: ") and "float64" in line, line


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_can_not_read_drafts_are_refused_by_name(name: str) -> None:
    line = _verdict(name)
    assert line.startswith("refused: ") and name in line and REFUSED[name] in line, line
    assert "decode without" in line or "pass one row" in line


RULES = {
    "prompt_is_read_alone": (runner_choice, lambda *_: False),
    "own_inputs": (runner_choice, lambda *_: None),
    "layers_apart": (cache_rollback, lambda _: frozenset()),
    "marked_causal": (sight, lambda _: True),
    "unmasked_window": (runner_choice, lambda *_: None),
}
CONTROLS = {
    "PaliGemmaForConditionalGeneration": ["prompt_is_read_alone"],
    "XLMWithLMHeadModel": ["own_inputs", "prompt_is_read_alone"],
    "MllamaForConditionalGeneration": ["layers_apart"],
    "FSMTForConditionalGeneration": ["marked_causal"],
    "MoshiForCausalLM": ["unmasked_window"],
}


@pytest.mark.parametrize("name", CONTROLS)
def test_control_without_its_rule_a_class_is_wrong(name: str, monkeypatch) -> None:
    for rule in CONTROLS[name]:
        place, instead = RULES[rule]
        monkeypatch.setattr(place, rule, instead)
    assert _verdict(name).startswith("WRONG: ")
