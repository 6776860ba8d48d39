"""Models whose `forward` doesn't name its arguments: the cache that `generate` made is used if the model fills it."""

from typing import Any

import pytest
import torch
from helpers.families import GPT, ROPE, SPECIAL, made, pair_of, prompts
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_specdec import SpeculativeDecoding
from hf_specdec.models.cache_names import cache_of

CALL: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}


class Wrapped(LlamaForCausalLM):
    """As code around a model often is."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


MODELS = {"wrapped": lambda: Wrapped(LlamaConfig(**ROPE, **SPECIAL)), "gpt1": made("OpenAIGPT", "LMHeadModel", **GPT)}


def widths_of(model: PreTrainedModel) -> list[int]:
    """Fills up with how many tokens of a row each pass reads."""
    widths: list[int] = []
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, given, __: widths.append(given[0].shape[-1]))
    return widths


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_a_pass_reads_the_text_once_where_the_model_keeps_it(kind: str, rows: int) -> None:
    """GPT has no cache, which its signature doesn't tell from one that is hidden."""
    target, draft = pair_of(MODELS[kind])
    inputs = prompts(rows)
    plain = target.generate(**inputs, **CALL)
    assert len(plain.sequences[0].unique()) > 5
    widths, draft_widths = widths_of(target), widths_of(draft)
    out = target.generate(**inputs, **CALL, custom_generate=SpeculativeDecoding(draft, num_assistant_tokens=3))
    assert torch.equal(out.sequences, plain.sequences) and 0 < out.speculation.acceptance_rate < 1
    longest = max(widths[rows:]), max(draft_widths[rows:])
    if kind == "wrapped":
        assert longest[0] <= 4 and longest[1] <= 2
        kept = inputs["attention_mask"].bool()
        length = plain.sequences.shape[1] - 1
        seen = torch.cat([kept, kept.new_ones(rows, length - kept.shape[1])], dim=1)
        if rows == 1:
            for mine, theirs in zip(cache_of(out).layers, cache_of(plain).layers, strict=True):
                torch.testing.assert_close(mine.keys.transpose(1, 2)[seen], theirs.keys.transpose(1, 2)[seen])
    else:
        assert longest[0] > 20
