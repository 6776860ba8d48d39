"""Drafting by copies: what is copied and how far, and how copies and a model share a batch."""

from collections.abc import Sequence

import pytest
import torch
from helpers.families import EOS, VOCABULARY, pair, prompts, repetitive
from helpers.models import Passes
from helpers.patches import copy_wherever_possible
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import SpeculationConfig, SpeculativeDecoding
from hf_specdec.drafting.drafter import BaseDrafter, DraftProposal
from hf_specdec.drafting.hybrid import HybridDrafter
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.drafting.suffix import SuffixDrafter
from hf_specdec.lengths.history import REMEMBERED, LengthHistory
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.rules.round_statistics import Round

NEW_TOKENS = 24


def drafter(limit: int = 4, eos: frozenset[int] = frozenset(), **settings) -> SuffixDrafter:
    return SuffixDrafter(StopRule(limit), vocabulary=VOCABULARY, eos_tokens=eos, **settings)


def copied(made: SuffixDrafter, *texts: Sequence[int], room: int = 16) -> list[list[int]]:
    """What is drafted after each text."""
    lengths = [len(text) for text in texts]
    ids = torch.tensor([[*text, *[0] * (max(lengths) + 16 - len(text))] for text in texts])
    proposal = made.propose(ids, lengths, [room] * len(texts))
    return [row[:count] for row, count in zip(proposal.tokens.tolist(), proposal.lengths, strict=True)]


def test_the_longest_match_goes_first_then_the_most_frequent_then_the_latest(monkeypatch) -> None:
    copy_wherever_possible(monkeypatch)
    assert copied(drafter(), [1, 2, 3, 9, 2, 3, 7, 5, 6, 1, 2, 3]) == [[9, 2, 3, 7]]
    assert copied(drafter(2), [5, 3, 9, 8, 5, 3, 7, 8, 5, 3, 9, 6, 5, 3]) == [[9, 6]]
    assert copied(drafter(2), [5, 3, 9, 8, 5, 3, 7, 8, 6, 5, 3]) == [[7, 8]]
    assert copied(drafter(), [1, 2, 3]) == [[]] and copied(drafter(3), [3, 3]) == [[3, 3, 3]]


def test_the_encoder_s_input_and_other_rows_are_looked_up_too(monkeypatch) -> None:
    copy_wherever_possible(monkeypatch)
    source = torch.tensor([[3, 4, 5, 6, 7]])
    assert copied(drafter(3, sources=source), [0, 4, 5]) == [[6, 7]]
    assert copied(drafter(1, sources=source), [4, 5, 9, 4, 5, 9, 4, 5]) == [[9]]
    assert copied(drafter(2), [1, 2, 3, 4], [9, 1, 2]) == [[], [3, 4]]


def test_drafts_end_at_eos_at_unknown_tokens_and_at_the_row_s_room(monkeypatch) -> None:
    copy_wherever_possible(monkeypatch)
    ids = torch.zeros(4, 12, dtype=torch.long)
    ids[:, :6] = torch.tensor(
        [[5, 6, EOS, 7, 8, 5], [10, 11, VOCABULARY, 7, 8, 10], [12, 13, 7, 8, 9, 12], [5, 6, 7, 8, 9, 5]]
    )
    proposal = drafter(4, frozenset({EOS})).propose(ids, [6] * 4, [4, 4, 1, 0])
    assert proposal.lengths == (2, 1, 1, 0) and proposal.probs is None and proposal.steps == 0
    assert proposal.tokens[0].tolist()[:2] == [6, EOS]
    assert ids[:, 6:].sum() == 0, "no processor reads the drafts"


def test_copies_that_were_wrong_end_and_those_that_were_right_grow() -> None:
    """Chances are learned by the length of the match, also in rounds without drafts."""
    chance = torch.Generator().manual_seed(0)
    noise = torch.randint(3, 47, (1, 1600), generator=chance)
    made = drafter(8)
    drafted = [made.propose(noise, [length], [8]).lengths[0] for length in range(20, 1600)]
    assert sum(drafted[-200:]) < sum(drafted[:200]) / 2
    made, repeated = drafter(8), [*range(3, 40)] * 4
    lengths = [len(copied(made, repeated[:n])[0]) for n in range(38, 100)]
    assert lengths[0] < 8 and lengths[-1] == 8


def finished(width: int, seconds: float) -> Round:
    return Round((width - 1,), (0,), (1,), (0.0,), 0, width, 0.0, seconds, seconds)


@pytest.mark.parametrize(("slope", "expected"), [(0.0, 8), (0.2, 3), (2.0, 0)])
def test_a_copy_is_as_long_as_it_pays_for_at_the_times_of_passes(slope: float, expected: int) -> None:
    """Of tokens each of which is right with a chance of 0.75, and then more surely."""
    made = drafter(8, known=LengthHistory())
    for width in (30, *(1, 2, 3, 5, 9) * 5):
        made.observe(finished(width, 1.0 + slope * (width - 1)))
    text = [*range(3, 30), *range(3, 7)]
    assert len(copied(made, text)[0]) == expected


def test_the_first_pass_of_a_width_is_not_timed() -> None:
    """It may be one that is not compiled yet; the second one counts."""
    made, text = drafter(8, known=LengthHistory()), [*range(3, 30), *range(3, 7)]
    for width, seconds in ((30, 1.0), (1, 1.0), (1, 1.0), (9, 9.0)):
        made.observe(finished(width, seconds))
    assert len(copied(made, text)[0]) > 0
    for _ in range(3):
        made.observe(finished(9, 9.0))
    assert copied(made, text) == [[]]


def test_copies_that_took_long_are_tried_again_after_a_while() -> None:
    """The pass may have stalled; without another try no copy would be made any more."""
    made, text = drafter(8, known=LengthHistory()), [*range(3, 30), *range(3, 7)]
    for width, seconds in ((30, 1.0), (1, 1.0), *4 * [(9, 9.0)]):
        made.observe(finished(width, seconds))
    for _ in range(REMEMBERED):
        assert copied(made, text) == [[]]
        made.observe(finished(1, 1.0))
    assert len(copied(made, text)[0]) > 0


def test_without_times_drafts_depend_on_the_text_alone() -> None:
    made = drafter(8)
    for width in (30, *(1, 2, 3, 5, 9) * 5):
        made.observe(finished(width, 1.0 + 2.0 * (width - 1)))
    assert len(copied(made, [*range(3, 30), *range(3, 7)])[0]) > 0


def test_lookup_is_another_name() -> None:
    assert SpeculationConfig(drafter="lookup") == SpeculationConfig(drafter="suffix")
    assert SpeculationConfig(drafter="suffix").resolve("llama").num_assistant_tokens == "auto"


def test_auto_stands_for_what_a_call_has() -> None:
    for has_model, drafter in ((True, "hybrid"), (False, "suffix")):
        chosen = SpeculationConfig(drafter="auto").choosing(has_model=has_model)
        assert chosen == SpeculationConfig(drafter=drafter, num_assistant_tokens="auto")
        chosen = SpeculationConfig(drafter="auto", num_assistant_tokens=3).choosing(has_model=has_model)
        assert chosen == SpeculationConfig(drafter=drafter, num_assistant_tokens=3)
    target, draft = pair("llama")
    for given in (None, draft):
        decoding = SpeculativeDecoding(given, drafter="auto")
        assert torch.equal(generate(target, repetitive(2), decoding), generate(target, repetitive(2), None))
        assert (sum(r.draft_steps for r in decoding.stats.rounds) > 0) == (given is not None)


def generate(target: PreTrainedModel, inputs: dict[str, Tensor], decoding: SpeculativeDecoding | None, **kw) -> Tensor:
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **kw}
    return target.generate(**inputs, **settings, custom_generate=decoding)


def test_an_encoder_s_input_is_copied_from(monkeypatch) -> None:
    """A look-up that could not see the encoder's input would find nothing after the start token."""
    target, _ = pair("t5")
    source = prompts(1)["input_ids"]
    copy_wherever_possible(monkeypatch)
    decoding = SpeculativeDecoding(drafter="suffix", num_assistant_tokens=3)
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
    copy_wherever_possible(monkeypatch)
    generate(target, inputs, decoding, max_new_tokens=60)
    assert 0 in compared and sum(compared) > 20


def test_a_hybrid_drafts_by_model_only_where_copies_bring_less(monkeypatch) -> None:
    copy_wherever_possible(monkeypatch)
    target, draft = pair("llama")
    decoding = SpeculativeDecoding(draft, drafter="hybrid", num_assistant_tokens=4)
    with Passes(draft) as passes:
        generate(target, repetitive(1), decoding, max_new_tokens=60, eos_token_id=None)
    rounds = decoding.stats.rounds
    assert passes.count == sum(r.draft_steps for r in rounds)
    looked_up = [r for r in rounds if r.draft_steps == 0 and r.drafted[0] > 0]
    assert looked_up and len(looked_up) < len(rounds)


def test_the_part_works_in_transformers_own_loop(monkeypatch) -> None:
    target, _ = pair("llama")
    inputs = repetitive(1)
    plain = generate(target, inputs, None)
    made = drafter(4, frozenset({EOS}), max_length=22 + NEW_TOKENS)
    monkeypatch.setattr(target, "_get_candidate_generator", lambda **_: made, raising=False)
    with Passes(target) as passes:
        output = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(output, plain) and passes.count < NEW_TOKENS


class Drafts(BaseDrafter):
    """A draft model that writes one token all the time."""

    TOKEN = 90

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        counts = tuple(min(space, self.rule.limit) for space in room)
        return DraftProposal(torch.full((len(room), max(counts)), self.TOKEN), counts, steps=max(counts))


def test_a_hybrid_takes_in_each_row_what_is_expected_to_bring_more() -> None:
    """A model that was right is preferred to a short match, but not to a long one; after rejections neither."""
    known, unknown = [*range(3, 30)] * 2, [*range(40, 67)]
    texts = known, unknown, [*range(100, 127)], [*unknown[:-1], unknown[0]]
    ids = torch.tensor([[*text, *[0] * (70 - len(text))] for text in texts])
    rule = StopRule(3)
    made = HybridDrafter(SuffixDrafter(StopRule(8), vocabulary=200), Drafts(rule), rule)

    def drafted_by_model(accepted: int) -> list[int]:
        proposal = made.propose(ids, [*map(len, texts)], [8] * 4)
        rows = [row for row in range(4) if proposal.lengths[row] and proposal.tokens[row, 0] == Drafts.TOKEN]
        counts = tuple(accepted if row in rows else 0 for row in range(4))
        made.observe(Round(proposal.lengths, counts, (1,) * 4, (0.0,) * 4, proposal.steps, 9, 0.0, 0.0, 0.0))
        return rows

    assert drafted_by_model(3) == [0, 1, 2, 3], "the first round is the model's"
    for _ in range(5):
        assert drafted_by_model(3) == [1, 2, 3]
    for _ in range(20):
        drafted_by_model(0)
    assert drafted_by_model(0) == []
