"""Experts that leave tokens out when a pass has too many: drafts are so short that none is left out for them."""

import math
from typing import Any

import pytest
import torch
from helpers.families import perturbed, spread
from helpers.identity import same_as_plain
from helpers.small_configs import small_config
from torch import Tensor
from transformers import NllbMoeForConditionalGeneration, PreTrainedModel, SwitchTransformersForConditionalGeneration

from hf_specdec import generation
from hf_specdec.config import SpeculationConfig
from hf_specdec.models import sight
from hf_specdec.models.expert_capacity import most_tokens

SETTINGS: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}


def switch(capacity: int) -> PreTrainedModel:
    return _model(SwitchTransformersForConditionalGeneration, expert_capacity=capacity)


def nllb(capacity: int = 64, share: float = -1.0) -> PreTrainedModel:
    settings = {"expert_capacity": capacity, "moe_eval_capacity_token_fraction": share}
    return _model(NllbMoeForConditionalGeneration, **settings)


def _model(kind: Any, **settings: Any) -> PreTrainedModel:
    config = small_config(kind.config_class)
    for name, value in {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "num_experts": 3, **settings}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=spread(name))
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the others don't compute in float64
    model.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=None, num_beams=1)
    return model.double()


def _ids(rows: int) -> Tensor:
    return torch.randint(3, 50, (rows, 9), generator=torch.Generator().manual_seed(1))


def _speculated(target: PreTrainedModel, inputs: dict[str, Tensor], tokens: int | str = 8) -> Any:
    return same_as_plain(target, perturbed(target, 0.02), inputs, SETTINGS, num_assistant_tokens=tokens)


@pytest.mark.parametrize(("make", "rows", "longest"), [
    (lambda: switch(4), 1, 3), (lambda: switch(2), 1, 1), (lambda: switch(9), 3, 2), (lambda: nllb(4), 1, 3),
    (lambda: nllb(9), 3, 2), (lambda: nllb(share=0.8), 1, 3), (lambda: nllb(share=1.0), 3, 16),
])  # fmt: skip
def test_tokens_are_plains_with_drafts_that_fit(make: Any, rows: int, longest: int) -> None:
    target = make()
    for tokens, prompt in ((8, 1), (8, 2), ("auto", 2)):
        inputs = {"input_ids": _ids(rows), "decoder_input_ids": _ids(rows)[:, :prompt]}
        rounds = _speculated(target, inputs, tokens).speculation.rounds
        assert 0 < max(max(one.drafted) for one in rounds) <= longest


@pytest.mark.parametrize("make", [lambda: switch(3), lambda: nllb(3)])
def test_of_one_rows_prompt_the_same_tokens_are_left_out(make: Any) -> None:
    _speculated(make(), {"input_ids": _ids(1), "decoder_input_ids": _ids(1)})


@pytest.mark.parametrize(("make", "rows", "words"), [
    (lambda: switch(1), 1, "Switch.*more than 1 .*passes over 1 rows with drafts have at least 2: pass fewer"),
    (lambda: nllb(4), 3, "NllbMoe.*more than 4 .*passes over 3 rows with drafts have at least 6"),
    (lambda: nllb(share=0.5), 1, "more than 1 "),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(make: Any, rows: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _speculated(make(), {"input_ids": _ids(rows)})


@pytest.mark.parametrize("make", [switch, nllb])
def test_control_longer_drafts_give_other_tokens(make: Any, monkeypatch) -> None:
    inputs = {"input_ids": _ids(1), "decoder_input_ids": _ids(1)}
    if torch.equal(make(1)(**inputs).logits, make(64)(**inputs).logits):
        pytest.skip("transformers 5.17 leaves out no token of Switch Transformers")
    monkeypatch.setattr(generation, "most_drafts", lambda *_: math.inf)
    monkeypatch.setattr(sight, "most_tokens", lambda _: math.inf)
    with pytest.raises(AssertionError):
        _speculated(make(2), {"input_ids": _ids(1)})


@pytest.mark.parametrize("share", [0.3, 0.5, 0.6, 0.75, 0.9, 0.99])
def test_so_many_tokens_can_all_have_one_expert_and_no_more(share: float) -> None:
    most = int(most_tokens(nllb(share=share)))
    assert all(math.ceil(share * tokens) >= tokens for tokens in range(1, most + 1))
    assert math.ceil(share * (most + 1)) < most + 1


def test_auto_stays_where_it_fits() -> None:
    config = SpeculationConfig(num_assistant_tokens="auto")
    assert config.drafting_at_most(16) is config and config.drafting_at_most(2).num_assistant_tokens == 2
