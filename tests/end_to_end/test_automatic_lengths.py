"""`num_assistant_tokens="auto"` in `generate()`: its tokens, and what calls learn from one another."""

from copy import deepcopy

import pytest
import torch
from helpers.families import pair, prompts

import hf_specdec
from hf_specdec.lengths import history
from hf_specdec.prepared import cuda_graphs


def test_experience_is_a_situation_s_own() -> None:
    target, draft = pair("llama")
    sampling = {"do_sample": True, "temperature": 0.7}
    apart = [(1, {}), (2, {}), (1, sampling), (1, sampling | {"temperature": 1.3}), (1, {"verification": "block"})]
    apart.append((1, {"assistant_model": deepcopy(draft)}))
    call = {"max_new_tokens": 8, "do_sample": False, "num_assistant_tokens": "auto"}
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        for rows, settings in (*apart, *apart):
            target.generate(**prompts(rows), **call | settings)
        draft.to(torch.float32)
        # Passes that are just being recorded teach no times: as many tokens as it takes until they are.
        target.generate(**prompts(1), **call | {"max_new_tokens": 40})
    known = history._histories.all_of(target)
    assert len(known) == len(apart) + 1, "the draft in another dtype"
    assert all(each.plain < 1.0 for each in known.values())


@pytest.mark.parametrize("end", ["length", "EOS"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_what_a_text_s_end_cuts_off_is_not_held_against_the_draft(kind: str, end: str, monkeypatch) -> None:
    """The target as its own draft is never rejected, however short the texts."""
    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    target, _ = pair("llama")
    texts = [prompts(1, seed=seed) for seed in range(12)]
    plain = [target.generate(**text, do_sample=False, max_new_tokens=4, eos_token_id=None) for text in texts]
    settings = {"do_sample": False, "num_assistant_tokens": "auto", "cache_implementation": kind}
    with hf_specdec.enable(target, assistant_model=target, generation_strategy="speculative"):
        for text, written in zip(texts, plain, strict=True):
            ends = {"max_new_tokens": 4} if end == "length" else {"eos_token_id": int(written[0, -1])}
            target.generate(**settings | text | {"max_new_tokens": 40} | ends)
    (known,) = history._histories.all_of(target).values()
    known = known._prepared or known
    assert min(list(known.accepted.reach())[:4]) > 0.85


def test_prepared_rounds_have_an_experience_of_their_own(monkeypatch) -> None:
    """One call in each kind of rounds, with the same settings, teaches its own kind alone."""
    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    target, draft = pair("llama")
    settings = {**prompts(1), "max_new_tokens": 40, "do_sample": False, "num_assistant_tokens": "auto"}
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        target.generate(**settings)
        (known,) = history._histories.all_of(target).values()
        plain = known.plain
        assert plain < 1.0 and known._prepared is None
        target.generate(**settings, cache_implementation="static")
        (known,) = history._histories.all_of(target).values()
    assert known.plain == plain
    assert known._prepared is not None and known._prepared.plain < 1.0 and known._prepared._prepared is None
