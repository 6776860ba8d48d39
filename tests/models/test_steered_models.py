"""Models that pass something on after every token are refused by name; those that only lengthen masks are served."""

from typing import Any

import pytest
from helpers.families import FAMILIES, prompts
from helpers.generating_classes import generating_classes
from helpers.identity import same_as_plain
from torch import Tensor
from transformers import GenerationMixin, LlamaForCausalLM

from hf_specdec import checks
from hf_specdec.compat.transformers_private import steered_by

NAME = "_update_model_kwargs_for_generation"
SETTINGS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SERVED = {"IdeficsForVisionText2Text", "MllamaForConditionalGeneration", "PaliGemmaForConditionalGeneration"}


class Turning(LlamaForCausalLM):
    """Its scores are shifted by as many places as it has made steps."""

    def forward(self, *args: Any, turns: int = 0, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.roll(turns, dims=-1)
        return output

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, *args: Any, **more: Any) -> Any:
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **more)
        return {**updated, "turns": updated.get("turns", 0) + 1}


class Counting(LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, *args: Any, **more: Any) -> Any:
        self.steps_made = 1
        return super()._update_model_kwargs_for_generation(*args, **more)


class Passing(LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, *args: Any, **more: Any) -> Any:
        """It does nothing of its own."""
        return super()._update_model_kwargs_for_generation(*args, **more)


def _model(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    plain = FAMILIES["llama"]()
    model = kind(plain.config).double().eval()
    model.load_state_dict(plain.state_dict())
    model.generation_config = plain.generation_config
    return model


def _speculated(model: LlamaForCausalLM) -> Tensor:
    output: Tensor = same_as_plain(model, None, prompts(1), SETTINGS, drafter="suffix").sequences
    return output


@pytest.mark.parametrize(("kind", "name"), [(Turning, "turns"), (Counting, "steps_made")])
def test_a_model_that_steers_is_refused_by_name(kind: type[LlamaForCausalLM], name: str) -> None:
    with pytest.raises(ValueError, match=f"model={kind.__name__} controls its decoding after every token, by {name}, "):
        _speculated(_model(kind))


def test_one_that_changes_nothing_is_served() -> None:
    assert len(_speculated(_model(Passing))) == 1


def test_control_unchecked_it_gives_other_tokens(monkeypatch) -> None:
    monkeypatch.setattr(checks, "steered_by", lambda _: [])
    with pytest.raises(AssertionError):
        _speculated(_model(Turning))


def test_of_all_classes_those_that_only_lengthen_masks_are_served() -> None:
    """The sweep (`make families`) compares these with plain `generate`."""
    base = getattr(GenerationMixin, NAME)
    own = [kind for kind in generating_classes(NAME) if getattr(kind, NAME, base) is not base]
    served = {kind.__name__ for kind in own if not steered_by(kind.__new__(kind))}
    assert served == SERVED & {kind.__name__ for kind in own}, "in 5.17 PaliGemma has no method of its own"
    assert len(own) > len(served) > 1
