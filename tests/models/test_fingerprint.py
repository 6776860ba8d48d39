"""What recordings and compiled code are kept by: every change of form is seen, and a change of numbers is none."""

import copy

import pytest
import torch
from helpers.int8_weights import Int8Weight
from helpers.models import llama
from torch.nn import Parameter
from transformers import PreTrainedModel

from hf_specdec.models.fingerprint import forms_of, state_of, weights_of
from hf_specdec.models.stored_tensors import tensors_of

FORMS = (
    *("transposed", "spread", "set", "resized", "converted", "biased", "quantized", "shared", "moved"),
    *("shared with another", "repeated another"),
)


def _changed(model: PreTrainedModel, form: str) -> None:
    """Changes the form of a weight; the last three leave the list of all weights, each of them once, as it is."""
    first, second, third = model.model.layers
    head, attention, embeddings = model.lm_head, first.self_attn, model.model.embed_tokens
    if form == "transposed":
        attention.q_proj.weight.data = attention.q_proj.weight.data.t()
    elif form == "spread":  # the same shape and numbers, further apart
        head.weight.data = torch.cat([head.weight.data] * 2, dim=1)[:, : head.in_features]
    elif form == "set":
        head.weight.set_(head.weight.untyped_storage(), 0, head.weight.shape, (1, head.weight.shape[0]))
    elif form == "resized":
        embeddings.weight.requires_grad_(False).resize_(32, 32)
    elif form == "converted":
        model.model.norm.weight.data = model.model.norm.weight.data.float()
    elif form == "biased":
        head.bias = Parameter(torch.zeros(64, dtype=model.dtype))
    elif form == "quantized":
        head.weight = Parameter(Int8Weight.of(head.weight.data), requires_grad=False)
    elif form == "shared":
        head.weight = embeddings.weight
    elif form == "moved":  # the bias of one layer becomes that of the next
        attention.k_proj.bias, attention.q_proj.bias = attention.q_proj.bias, None
    elif form == "shared with another":
        third.mlp.up_proj.weight = second.mlp.up_proj.weight
    else:
        model.model.layers[2] = second


def _model(form: str) -> PreTrainedModel:
    model = llama(num_hidden_layers=3)
    layers = model.model.layers
    layers[0].self_attn.q_proj.bias = Parameter(torch.ones(32, dtype=model.dtype))
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    if form == "repeated another":
        layers[2] = layers[0]
    return model


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_every_change_of_form_is_seen(form: str) -> None:
    """Captured steps are kept by addresses, too."""
    model = _model(form)
    before, addresses = (forms_of(model), state_of(model)), weights_of(model)
    assert ((forms_of(model), state_of(model)), weights_of(model)) == (before, addresses)
    _changed(model, form)
    after = forms_of(model), state_of(model)
    assert after != before
    assert (weights_of(model), forms_of(model)) != (addresses, before[0]) or form == "repeated another"
    assert (forms_of(model), state_of(model)) == after


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
