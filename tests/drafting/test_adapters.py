"""Drafts and targets wrapped by PEFT: adapters are at work, and so is the cache."""

import peft
import pytest
import torch
from helpers.families import pair, prompts
from helpers.identity import same_as_plain

from hf_specdec.models.traits import without_adapter_wrapper
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.engine_store import kept_engines

SETTINGS = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}


def adapted(model, seed: int = 0):
    """A model with an adapter that changes what it says."""
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    return wrapped.to(model.dtype).eval()


def test_a_wrapped_draft_runs_with_its_cache() -> None:
    target, draft = pair("llama")
    wrapped = adapted(draft)
    widths: list[int] = []
    draft.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    same_as_plain(target, wrapped, prompts(1), SETTINGS, num_assistant_tokens=3)
    assert len(widths) > 5 and max(widths[1:]) <= 2, "all but the prompt is one or two tokens"


def test_adapters_of_target_and_draft_can_be_switched_between_calls() -> None:
    base, draft = pair("llama")
    target, wrapped = adapted(base), adapted(draft, seed=1)
    answers = []
    for enabled in (True, False, True):
        for model in (target, wrapped):
            (model.enable_adapter_layers if enabled else model.disable_adapter_layers)()
        answers.append(same_as_plain(target, wrapped, prompts(2), SETTINGS).sequences)
    assert not torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("prepared", [False, True])
def test_one_of_several_adapters_is_chosen_for_each_call(prepared: bool, monkeypatch) -> None:
    """Also where rounds are prepared for later calls, here those for CUDA graphs, uncaptured."""
    if prepared:
        monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    target, wrapped = (adapted(model, seed) for seed, model in enumerate(pair("llama")))
    for model in (target, wrapped):
        torch.manual_seed(7)
        model.add_adapter("other", model.peft_config["default"])
        model.to(torch.float64)
    answers = []
    for name in ("default", "other", "default"):
        target.set_adapter(name)
        for of_draft in ("default", "other"):
            wrapped.set_adapter(of_draft)
            out = same_as_plain(target, wrapped, prompts(1), SETTINGS, cache_implementation="static")
        answers.append(out.sequences)
    assert bool(kept_engines(target.get_base_model(), compile=False)) == prepared
    assert not torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


def test_prompt_learning_keeps_its_wrapper() -> None:
    _, draft = pair("llama")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = peft.get_peft_model(draft, config)
    assert without_adapter_wrapper(wrapped) is wrapped and without_adapter_wrapper(draft) is draft
