"""What recordings and compiled code are kept by: every change of form is seen, and a change of numbers is none."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers.int8_weights import Int8Weight
from helpers.models import llama
from torch.nn import Parameter
from transformers import PreTrainedModel

from hf_specdec.models.fingerprint import forms_of, state_of, weights_of
from hf_specdec.models.stored_tensors import tensors_of

Change = Callable[[PreTrainedModel], None]


def _transpose(model: PreTrainedModel) -> None:
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight.data = projection.weight.data.t()


def _spread(model: PreTrainedModel) -> None:
    """The same shape and numbers, further apart."""
    head = model.lm_head
    head.weight.data = torch.cat([head.weight.data] * 2, dim=1)[:, : head.in_features]


def _set(model: PreTrainedModel) -> None:
    weight = model.lm_head.weight
    with torch.no_grad():
        weight.set_(weight.untyped_storage(), 0, weight.shape, (1, weight.shape[0]))


def _resize(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight.requires_grad_(False).resize_(32, 32)


def _convert(model: PreTrainedModel) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data.float()


def _add_bias(model: PreTrainedModel) -> None:
    model.lm_head.bias = Parameter(torch.zeros(64, dtype=model.dtype))


def _quantize(model: PreTrainedModel) -> None:
    model.lm_head.weight = Parameter(Int8Weight.of(model.lm_head.weight.data), requires_grad=False)


def _share(model: PreTrainedModel) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def _move(model: PreTrainedModel) -> None:
    """The bias of one layer becomes that of the next, in the same place of the list of all weights."""
    attention = model.model.layers[0].self_attn
    attention.k_proj.bias, attention.q_proj.bias = attention.q_proj.bias, None


def _share_with_another(model: PreTrainedModel) -> None:
    """The list of all weights, each of them once, stays the same."""
    first, second, third = (layer.mlp.up_proj for layer in model.model.layers)
    assert third.weight is first.weight
    third.weight = second.weight


def _repeat_another(model: PreTrainedModel) -> None:
    """Of layers, too."""
    first, second, third = model.model.layers
    assert third is first
    model.model.layers[2] = second


def _model(change: Change) -> PreTrainedModel:
    model = llama(num_hidden_layers=3)
    layers = model.model.layers
    layers[0].self_attn.q_proj.bias = Parameter(torch.ones(32, dtype=model.dtype))
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    if change is _repeat_another:
        layers[2] = layers[0]
    return model


FORMS = (_transpose, _spread, _set, _resize, _convert, _add_bias, _quantize, _share, _move, _share_with_another)


@pytest.mark.parametrize("change", [*FORMS, _repeat_another])
def test_every_change_of_form_is_seen(change: Change) -> None:
    model = _model(change)
    before = forms_of(model), state_of(model)
    assert (forms_of(model), state_of(model)) == before
    change(model)
    assert (forms_of(model), state_of(model)) != before
    after = forms_of(model), state_of(model)
    assert (forms_of(model), state_of(model)) == after


@pytest.mark.parametrize("change", [_transpose, _spread, _set, _share, _quantize])
def test_captured_steps_are_kept_by_addresses_too(change: Change) -> None:
    model = _model(change)
    before = weights_of(model), forms_of(model)
    change(model)
    assert (weights_of(model), forms_of(model)) != before


def test_other_numbers_and_other_tensors_of_the_same_form_are_no_change_of_form() -> None:
    """Only of what is captured."""
    model = llama()
    before = forms_of(model), state_of(model)
    addresses = weights_of(model)
    with torch.no_grad():
        model.lm_head.weight += 1
    assert weights_of(model) == addresses
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert weights_of(model) != addresses
    model.lm_head.weight = Parameter(model.lm_head.weight.detach().clone())
    assert (forms_of(model), state_of(model)) == before


def test_what_two_models_share_is_part_of_their_form() -> None:
    target = llama()
    draft = copy.deepcopy(target)
    apart = forms_of(target, draft)
    draft.lm_head.weight = target.lm_head.weight
    assert forms_of(target, draft) != apart
    assert (forms_of(target), forms_of(draft)) == (forms_of(target), forms_of(copy.deepcopy(draft)))


@pytest.mark.parametrize("place", ["attribute", "list"])
def test_a_tensor_among_attributes_is_seen_to_change(place: str) -> None:
    """It is no weight, and a recording holds it as it was."""
    model = llama()
    tensor = torch.eye(3)
    model.model.of_the_user_s = tensor if place == "attribute" else [tensor]
    before = state_of(model)
    assert state_of(model) == before
    tensor.data = torch.ones(3, 3)
    assert state_of(model) != before


def test_tensors_come_in_the_same_order_whatever_their_numbers() -> None:
    model = llama()
    model.lm_head.weight = Parameter(Int8Weight.of(model.lm_head.weight.data), requires_grad=False)
    before = [(tensor.shape, tensor.dtype) for tensor in tensors_of(model)]
    for module in model.modules():
        for name, weight in module._parameters.items():
            if type(weight) is Parameter:
                setattr(module, name, Parameter(weight.detach().clone()))
    assert [(tensor.shape, tensor.dtype) for tensor in tensors_of(model)] == before
