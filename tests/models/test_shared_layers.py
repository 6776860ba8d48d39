"""Layers that compute alike are traced once; a layer that reads more than it is given is traced with the whole pass."""

import pytest
import torch
from helpers.families import ROPE, made, prompts
from helpers.identity import same_as_plain
from helpers.models import llama, noisy
from helpers.patches import noted
from torch import Tensor
from transformers.models.llama import modeling_llama

from hf_specdec.models import jit_traces, recorded_passes, shared_layers
from hf_specdec.models.fingerprint import kind_of, state_of

SETTINGS = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture
def traces(monkeypatch) -> list[str]:
    """Passes are recorded at once; the name of every function that was traced."""
    names = noted(monkeypatch, jit_traces, "traced", lambda step, *_: step.__name__)
    monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 1)
    for module in (recorded_passes, shared_layers):
        monkeypatch.setattr(module, "traced", jit_traces.traced)
    return names


def _decodes_as_plain(target: torch.nn.Module, draft: torch.nn.Module, rows: int = 1) -> None:
    for _ in range(3):
        same_as_plain(target, draft, prompts(rows), SETTINGS, num_assistant_tokens=3)


@pytest.mark.parametrize("depth", [2, 5])
def test_as_many_traces_at_every_depth(depth: int, traces: list[str]) -> None:
    target = llama(num_hidden_layers=depth)
    _decodes_as_plain(target, noisy(target))
    passes = traces.count("<lambda>")  # those that call a layer's trace
    assert passes and traces.count("layer") == passes, "one layer stands for all"
    assert traces.count("step") == 0, "no pass is traced with all its layers"


def test_each_kind_of_layer_has_a_trace(traces: list[str]) -> None:
    """Sliding and full attention in turn."""
    torch.manual_seed(0)
    target = made("Gemma2", **{**ROPE, "num_hidden_layers": 4}, head_dim=8, sliding_window=9)().double().eval()
    _decodes_as_plain(target, noisy(target))
    assert traces.count("layer") == 2 * traces.count("<lambda>") > 0


def test_layers_that_know_their_place_are_traced_one_by_one(traces: list[str], monkeypatch) -> None:
    """The negative control of the comparison: as one function they would all be the first."""
    norm = modeling_llama.LlamaMLP.forward
    target = llama(num_hidden_layers=3)
    for place, layer in enumerate(target.model.layers):
        layer.mlp.layer_idx = place
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: norm(self, x) * (1 + self.layer_idx))
    _decodes_as_plain(target, noisy(target))
    assert traces.count("step") > 0


def test_layers_that_read_what_they_are_not_given_are_traced_one_by_one(traces: list[str], monkeypatch) -> None:
    """A tensor that one layer leaves for the next would be the first text's in a layer's trace."""
    kept: list[Tensor] = []
    forward = modeling_llama.LlamaModel.forward
    mlp = modeling_llama.LlamaMLP.forward

    def model_forward(self: torch.nn.Module, input_ids: Tensor, **kwargs: object) -> object:
        kept[:] = [1 + 0.5 * torch.sin(input_ids.to(self.dtype)).unsqueeze(-1)]
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", model_forward)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: mlp(self, x) * kept[0])
    target = llama(num_hidden_layers=3)
    _decodes_as_plain(target, noisy(target))
    assert traces.count("layer") > 0 and traces.count("<lambda>") == 0 and traces.count("step") > 0


def test_kinds_differ_by_what_is_computed_not_by_place_or_weights() -> None:
    first, second, third = llama(num_hidden_layers=3).model.layers
    assert kind_of(first) == kind_of(second)
    second.self_attn.scaling *= 2
    assert kind_of(first) != kind_of(second)
    third.mlp.act_fn = torch.nn.Tanh()
    assert kind_of(first) != kind_of(third)


def test_the_model_stays_as_it_was(traces: list[str]) -> None:
    target = llama(num_hidden_layers=3)
    layers, state = list(target.model.layers), state_of(target)
    _decodes_as_plain(target, noisy(target))
    assert traces and list(target.model.layers) == layers and state_of(target) == state
