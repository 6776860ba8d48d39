"""What a call leaves behind is the caller's: ordinary tensors, whatever mode the passes ran in."""

from __future__ import annotations

import pytest
from families import pair, prompts
from transformers import DynamicCache

import hf_specdec


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_autograd_may_use_everything_that_is_returned(family: str) -> None:
    target, draft = pair(family)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        out = target.generate(
            **prompts(2),
            max_new_tokens=6,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
    kept = [out.sequences, *out.scores, *out.logits]
    cache = out.past_key_values
    for part in (cache.self_attention_cache, cache.cross_attention_cache) if family == "t5" else (cache,):
        kept += [tensor for layer in part.layers for tensor in (layer.keys, layer.values)]
    assert not any(tensor.is_inference() for tensor in kept)


def test_a_given_cache_can_be_trained_on_afterwards() -> None:
    target, draft = pair("llama")
    cache = DynamicCache(config=target.config)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        tokens = target.generate(**prompts(1), max_new_tokens=6, do_sample=False, past_key_values=cache)
    target(tokens[:, -1:], past_key_values=cache).logits.sum().backward()
    assert target.get_output_embeddings().weight.grad is not None


def test_training_goes_on_after_a_call() -> None:
    target, draft = pair("gpt-j")
    inputs = prompts(2)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        target.generate(**inputs, max_new_tokens=6, do_sample=False)
    for model in (target, draft):
        model(**inputs).logits.sum().backward()
        assert all(weight.grad is not None for weight in model.parameters() if weight.dim() > 1)
