"""What prepared rounds keep between calls: nothing of a call that broke off, or of what has changed since."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.families import pair, prompts

import hf_specdec
from hf_specdec.prepared import round_steps
from hf_specdec.prepared.prepared_rounds import PreparedRounds

SETTINGS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
STATIC = {**SETTINGS, "cache_implementation": "static", "num_assistant_tokens": 3}


@pytest.fixture
def prepared(fast_rounds: list[PreparedRounds]) -> Iterator[list[PreparedRounds]]:
    """`fast_rounds`, whose engines no other test finds."""
    yield fast_rounds
    hf_specdec.release()


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("passes", [1, 3, 4, 6, 8])
def test_a_call_that_broke_off_in_any_pass_leaves_nothing(
    error: type[BaseException], passes: int, prepared: list[PreparedRounds], monkeypatch
) -> None:
    """Three drafts and a verification take four passes."""
    target, draft = pair("llama")
    expected = target.generate(**prompts(2), **SETTINGS, generation_strategy=None)
    target.generate(**prompts(2), **STATIC, assistant_model=draft)
    run_pass, left = round_steps.static_pass, [passes]

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise error("of the test")
        return run_pass(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(round_steps, "static_pass", failing)
        with pytest.raises(error, match="of the test"):
            target.generate(**prompts(2, seed=5), **STATIC, assistant_model=draft)
    rounds = len(prepared)
    assert torch.equal(target.generate(**prompts(2), **STATIC, assistant_model=draft), expected)
    assert len(prepared) > rounds and len({id(decoder.engine) for decoder in prepared}) == 1


def test_an_edited_configuration_gets_another_engine(prepared: list[PreparedRounds]) -> None:
    """Models read some of its values in every pass, which a captured or compiled pass would not."""
    target, draft = pair("gemma2")
    engines = []
    for cap in (None, None, 0.5):
        target.config.attn_logit_softcapping = cap
        target.generate(**prompts(1), **STATIC, assistant_model=draft)
        engines.append(prepared[-1].engine)
    assert engines[0] is engines[1] is not engines[2]


@pytest.mark.parametrize("lookahead", [3, "auto"])
def test_prompts_of_two_tokens(lookahead: int | str, prepared: list[PreparedRounds]) -> None:
    """The first draft step reads both of them; no pass reads the prompt before it."""
    target, draft = pair("llama")
    inputs = {"input_ids": torch.tensor([[5, 9]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    call = {**STATIC, "num_assistant_tokens": lookahead, "assistant_model": draft}
    expected = target.generate(**inputs, **SETTINGS, generation_strategy=None)
    assert torch.equal(target.generate(**inputs, **call), expected) and prepared


@pytest.mark.parametrize("sampled", [False, True])
def test_probabilities_of_drafts_are_kept_only_where_the_rule_reads_them(sampled: bool, prepared) -> None:
    target, draft = pair("llama")
    target.generate(**prompts(2), **{**STATIC, "do_sample": sampled}, assistant_model=draft)
    drafts = prepared[-1].engine.steps[3].run_draft()
    assert len(drafts.tokens) == 3 and len(drafts.probs) == (3 if sampled else 0)
