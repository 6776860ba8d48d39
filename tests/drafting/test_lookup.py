"""Drafting by look-up: what is copied, and how copies and a model share a batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.families import EOS, VOCABULARY, pair, prompts, repetitive
from helpers.models import Passes
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import SpeculativeDecoding
from hf_specdec.drafting import drafter_choice
from hf_specdec.drafting.lookup import LookupDrafter, NgramIndex, RowText
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.lengths.stop_rules import StopRule

NEW_TOKENS = 24
SIZES = (3, 2, 1)


def copied(text: list[int], source: tuple[int, ...] = (), count: int = 4, sizes: tuple[int, ...] = SIZES) -> list[int]:
    row = RowText(sizes, source)
    row.own.extend(text)
    return row.continuation(count)


def test_the_longest_match_goes_first_and_of_those_the_latest() -> None:
    assert copied([1, 2, 3, 9, 2, 3, 7, 5, 6, 1, 2, 3]) == [9, 2, 3, 7]
    assert copied([5, 3, 9, 8, 5, 3, 7, 8, 5, 3], count=2) == [7, 8]
    assert copied([1, 2, 3]) == []
    assert copied([1, 2, 1], count=0) == []


def test_a_copy_that_reaches_the_end_goes_on_with_itself() -> None:
    assert copied([7, 4, 5, 4, 5], count=5) == [4, 5, 4, 5, 4]
    assert copied([3, 3], count=3) == [3, 3, 3]


def test_the_source_is_looked_up_where_it_matches_longer_and_ends_before_the_text() -> None:
    assert copied([0, 4, 5], source=(3, 4, 5, 6, 7), count=3) == [6, 7]
    assert copied([5, 9, 4, 5], source=(4, 5, 6)) == [6]
    assert copied([4, 5, 9, 4, 5], source=(4, 5, 6), count=1) == [9]
    assert copied([8, 1, 5], source=(4, 5), sizes=(1,)) == []


def test_matches_are_no_longer_than_the_caller_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    class Seen(LookupDrafter):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            made.append(tuple(self.sizes))

    monkeypatch.setattr(drafter_choice, "LookupDrafter", Seen)
    target, draft = pair("llama")
    for drafter, most in (("lookup", None), ("lookup", 2), ("lookup", 9), ("hybrid", 3), ("hybrid", 2)):
        decoding = SpeculativeDecoding(draft, drafter=drafter)
        generate(target, prompts(1), decoding, max_matching_ngram_size=most)
    assert made == [(3, 2, 1), (2, 1), (3, 2, 1), (3,), (2,)]


@pytest.mark.parametrize("seed", range(5))
def test_the_index_equals_a_search_however_the_text_comes(seed: int) -> None:
    """Tokens fed in random pieces, against a search written from the definition."""
    chance = random.Random(seed)
    text = [chance.randrange(4) for _ in range(60)]
    index, fed = NgramIndex(SIZES), 0
    while fed < len(text):
        piece = chance.randint(0, 5)
        index.extend(text[fed : fed + piece])
        fed = min(fed + piece, len(text))
        for size in (s for s in SIZES if s <= fed):
            last = tuple(text[fed - size : fed])
            ends = [end for end in range(size, fed) if tuple(text[end - size : end]) == last]
            assert index.find(last) == (max(ends) if ends else None)


def drafter(rule: StopRule, eos: frozenset[int] = frozenset()) -> LookupDrafter:
    return LookupDrafter(rule, vocabulary=VOCABULARY, eos_tokens=eos)


def test_drafts_end_at_eos_at_unknown_tokens_and_at_the_row_s_room() -> None:
    ids = torch.zeros(4, 12, dtype=torch.long)
    ids[:, :6] = torch.tensor(
        [[5, 6, EOS, 7, 8, 5], [5, 6, VOCABULARY, 7, 8, 5], [5, 6, 7, 8, 9, 5], [5, 6, 7, 8, 9, 5]]
    )
    proposal = drafter(StopRule(4), frozenset({EOS})).propose(ids, [6] * 4, [4, 4, 1, 0])
    assert proposal.lengths == (2, 1, 1, 0) and proposal.probs is None and proposal.steps == 0
    assert proposal.tokens[0].tolist() == [6, EOS]
    assert ids[:, 6:].sum() == 0, "no processor reads the drafts"


def test_a_row_of_a_ragged_batch_drafts_as_alone() -> None:
    chance = torch.Generator().manual_seed(0)
    texts = torch.randint(3, 8, (3, 40), generator=chance)
    lengths = [[9, 9, 9], [12, 10, 15], [13, 11, 22], [13, 17, 24]]
    together, alone = drafter(StopRule(5)), [drafter(StopRule(5)) for _ in range(3)]
    for now in lengths:
        room = [5 if now != lengths[-1] else 0, 5, 3]
        batch = together.propose(texts.clone(), now, room)
        for row in range(3):
            single = alone[row].propose(texts[row : row + 1].clone(), now[row : row + 1], room[row : row + 1])
            n = single.lengths[0]
            assert batch.lengths[row] == n
            assert batch.tokens[row, :n].tolist() == single.tokens[0, :n].tolist()


def generate(target: PreTrainedModel, inputs: dict[str, Tensor], decoding: SpeculativeDecoding | None, **kw) -> Tensor:
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **kw}
    return target.generate(**inputs, **settings, custom_generate=decoding)


def test_an_encoder_s_input_is_copied_from() -> None:
    """A look-up that could not see the encoder's input would find nothing after the start token."""
    target, _ = pair("t5")
    source = prompts(1)["input_ids"]
    decoding = SpeculativeDecoding(drafter="lookup", num_assistant_tokens=3)
    start = source[:, 2:3]
    generate(target, {"input_ids": source, "decoder_input_ids": start}, decoding, num_return_sequences=1)
    assert decoding.stats is not None and decoding.stats.rounds[0].drafted == (3,)


def test_the_draft_s_cache_catches_up_with_what_it_did_not_read(monkeypatch) -> None:
    """A hybrid's model drafts what it would draft with nothing cached, whatever rounds passed without it."""
    target, draft = pair("llama", noise=0.3)
    inputs = repetitive(4)
    compared = []
    propose = ModelDrafter.propose

    def check(self: ModelDrafter, ids: Tensor, lengths: list[int], room: list[int]):
        proposal = propose(self, ids, lengths, room)
        for row, n in enumerate(lengths):
            drafted = proposal.lengths[row]
            mask = torch.ones(1, n + drafted, dtype=torch.long)
            mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"][row]
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            with torch.no_grad():
                text = torch.cat([ids[row, :n], proposal.tokens[row, :drafted]]).unsqueeze(0)
                logits = draft(text, attention_mask=mask, position_ids=positions).logits
            assert logits[0, n - 1 : n - 1 + drafted].argmax(-1).tolist() == proposal.tokens[row, :drafted].tolist()
            compared.append(drafted)
        return proposal

    monkeypatch.setattr(ModelDrafter, "propose", check)
    decoding = SpeculativeDecoding(draft, drafter="hybrid", num_assistant_tokens=3)
    monkeypatch.setattr("hf_specdec.drafting.drafter_choice.HYBRID_SIZES", (2, 1))
    generate(target, inputs, decoding, max_new_tokens=60)
    assert 0 in compared and sum(compared) > 20


def test_a_hybrid_drafts_by_model_only_where_nothing_matches() -> None:
    target, draft = pair("llama")
    decoding = SpeculativeDecoding(draft, drafter="hybrid", num_assistant_tokens=4)
    with Passes(draft) as passes:
        generate(target, repetitive(1), decoding, max_new_tokens=60, eos_token_id=None)
    assert decoding.stats is not None
    rounds = decoding.stats.rounds
    assert passes.count == sum(r.draft_steps for r in rounds)
    looked_up = [r for r in rounds if r.draft_steps == 0 and r.drafted[0] > 0]
    assert looked_up and len(looked_up) < len(rounds)


def test_the_part_works_in_transformers_own_loop(monkeypatch) -> None:
    target, _ = pair("llama")
    inputs = repetitive(1)
    plain = generate(target, inputs, None)
    made = LookupDrafter(StopRule(4), vocabulary=VOCABULARY, eos_tokens=frozenset({EOS}), max_length=22 + NEW_TOKENS)
    monkeypatch.setattr(target, "_get_candidate_generator", lambda **_: made, raising=False)
    with Passes(target) as passes:
        output = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(output, plain)
    assert passes.count < NEW_TOKENS
