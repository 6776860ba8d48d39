"""BiLD against a slow, obvious reference, its limits, and its parts inside transformers' own assisted loop."""

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.models import EOS, PAD, VOCABULARY, encoder_prompts, llama, noisy, prompts, t5
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from hf_specdec import SpeculativeDecoding
from hf_specdec.drafting.draft_inputs import draft_inputs
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.relaxations import BildRollback
from hf_specdec.lengths.stop_rules import Fallback, StopRule
from hf_specdec.models.runner_choice import runner_for
from hf_specdec.rules.round_statistics import Round

NEW_TOKENS = 16


@dataclass(frozen=True)
class Family:
    """A pair with its prompts; `text` is what a row's decoder starts from."""

    target: PreTrainedModel
    draft: PreTrainedModel
    inputs: dict[str, Tensor]

    def row(self, row: int) -> dict[str, Tensor]:
        """One row without its padding."""
        kept = self.inputs["attention_mask"][row].bool()
        return {key: value[row : row + 1, kept] for key, value in self.inputs.items()}


@pytest.fixture(scope="module", params=["llama", "t5"])
def family(request) -> Family:
    if request.param == "llama":
        target = llama()
        return Family(target, noisy(target), prompts(4))
    target = t5()
    return Family(target, noisy(target), encoder_prompts(4))


@torch.no_grad()
def distribution(model: PreTrainedModel, inputs: dict[str, Tensor], text: list[int]) -> list[float]:
    """The next token's distribution after `text`, from scratch: no cache."""
    ids = torch.tensor([text])
    if model.config.is_encoder_decoder:
        logits = model(**inputs, decoder_input_ids=ids, use_cache=False).logits
    else:
        logits = model(ids, use_cache=False).logits
    return logits[0, -1].float().softmax(-1).tolist()


def best(probs: list[float]) -> int:
    return probs.index(max(probs))


def reference(
    family: Family, row: int, lookahead: int, fallback: float, rollback: float
) -> tuple[list[int], list[tuple[int, int]]]:
    """BiLD (Kim et al. 2023) as the design states it, greedy, one row: text, and (drafted, accepted) per round."""
    inputs = family.row(row)
    text = [PAD] if family.target.config.is_encoder_decoder else inputs["input_ids"][0].tolist()
    end, rounds = len(text) + NEW_TOKENS, []
    while len(text) < end and text[-1] != EOS:
        drafts: list[int] = []
        while len(drafts) < lookahead and len(text) + len(drafts) + 1 < end:
            probs = distribution(family.draft, inputs, text + drafts)
            if max(probs) < fallback:
                break
            drafts.append(best(probs))
            if drafts[-1] == EOS:
                break
        accepted = 0
        for token in drafts:
            probs = distribution(family.target, inputs, text)
            distance = -math.log(probs[token]) if probs[token] > 0 else math.inf
            if distance > rollback and token != best(probs):
                break
            text.append(token)
            accepted += 1
        if text[-1] != EOS or accepted == 0:
            text.append(best(distribution(family.target, inputs, text)))
        rounds.append((len(drafts), accepted))
    return text, rounds


@pytest.mark.parametrize("trial", range(8))
def test_bild_equals_the_reference(family: Family, trial: int) -> None:
    """Tokens, drafts and acceptances of every round, over random thresholds."""
    chance = random.Random(trial)
    lookahead = chance.choice([1, 3, 5])
    fallback, rollback = (
        chance.choice([0.0, chance.random(), chance.uniform(0.05, 0.2), chance.uniform(0.05, 0.2)]),
        chance.expovariate(0.5),
    )
    row = chance.randrange(4)
    text, rounds = reference(family, row, lookahead, fallback, rollback)
    decoding = bild(family, lookahead, fallback, rollback)
    output = family.target.generate(
        **family.row(row), do_sample=False, max_new_tokens=NEW_TOKENS, custom_generate=decoding
    )
    assert output[0].tolist() == text
    assert [(r.drafted[0], r.accepted[0]) for r in decoding.stats.rounds] == rounds


@pytest.mark.parametrize("trial", range(2))
def test_a_ragged_batch_equals_the_reference_row_by_row(family: Family, trial: int) -> None:
    chance = random.Random(100 + trial)
    fallback, rollback = chance.uniform(0.05, 0.2), chance.uniform(0.5, 2.5)
    decoding = bild(family, 4, fallback, rollback)
    output = family.target.generate(
        **family.inputs, do_sample=False, max_new_tokens=NEW_TOKENS, custom_generate=decoding
    )
    start = 1 if family.target.config.is_encoder_decoder else family.inputs["input_ids"].shape[1]
    for row in range(4):
        text, _ = reference(family, row, 4, fallback, rollback)
        new = text[1:] if family.target.config.is_encoder_decoder else text[family.row(row)["input_ids"].shape[1] :]
        assert output[row, start : start + len(new)].tolist() == new


def test_thresholds_change_the_text(family: Family) -> None:
    """Control: the references above could not agree by ignoring the rollback threshold."""
    texts = {str(reference(family, row, 4, 0.0, rollback)[0]) for row in (1, 2) for rollback in (0.0, 5.0)}
    assert len(texts) > 2


def bild(family: Family, lookahead: int, fallback: float, rollback: float) -> SpeculativeDecoding:
    return SpeculativeDecoding(
        family.draft, "bild", num_assistant_tokens=lookahead, fallback_threshold=fallback, rollback_threshold=rollback
    )


def plain(family: Family) -> Tensor:
    return family.target.generate(**family.inputs, do_sample=False, max_new_tokens=NEW_TOKENS)


def run(family: Family, decoding: SpeculativeDecoding) -> Tensor:
    return family.target.generate(**family.inputs, do_sample=False, max_new_tokens=NEW_TOKENS, custom_generate=decoding)


def test_the_limits(family: Family) -> None:
    """Rollback 0 gives the target's text, infinity never rolls back; fallback 1 drafts nothing, 0 never falls back."""
    speculative, found = SpeculativeDecoding(family.draft, num_assistant_tokens=4), {}
    text = run(family, speculative)
    assert torch.equal(text, plain(family))
    for fallback, rollback in ((0.0, 0.0), (0.1, 0.0), (1.0, 0.0), (0.0, math.inf)):
        found[fallback, rollback] = decoding = bild(family, 4, fallback, rollback)
        assert torch.equal(run(family, decoding), text) == (rollback == 0.0)
    (everything, some, nothing, kept), wanted = (each.stats for each in found.values()), speculative.stats
    assert [(r.drafted, r.accepted) for r in everything.rounds] == [(r.drafted, r.accepted) for r in wanted.rounds]
    assert everything.drafted > some.drafted > some.accepted > 0 == nothing.drafted
    assert 0 < everything.acceptance_rate < 1.0 == kept.acceptance_rate


def test_fallback_one_lets_certain_tokens_through() -> None:
    """Probability 1 is not below 1; the next float is."""
    certain = torch.tensor([[1.0, 0.0], [1.0 - 2.0**-24, 2.0**-24]])
    assert Fallback(3, 1.0).before_append(certain).tolist() == [False, True]
    assert Fallback(3, 0.0).before_append(certain * 0.5).tolist() == [False, False]


def test_at_zero_no_token_stands_that_falls_short_of_certain_however_large_the_scores() -> None:
    """In sampling; a sum of scores of 5000 would lose a distance of 1e-4."""
    scores = torch.full((1, 1, 4), -9e3)
    scores[..., 0], scores[..., 1] = 5000.0, 4991.0
    distance = float(-scores.double().log_softmax(-1)[0, 0, 0])
    assert 1e-4 < distance < 2e-4
    for threshold in (0.0, distance * 0.99, distance * 1.01):
        kept = BildRollback(threshold, greedy=False).keeps(scores, torch.tensor([[[0]]]))
        assert bool(kept) == (threshold > distance)
    assert not BildRollback(9.0, greedy=False).keeps(torch.full((1, 1, 4), -torch.inf), torch.tensor([[[0]]]))


def test_a_token_stands_up_to_the_threshold_and_only_where_drafted() -> None:
    """Distances of (ln 2, ln 4): exactly at a threshold a token stands, in sampling an argmax has no privilege."""
    scores = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log().expand(1, 2, 3)
    one = torch.tensor([1])

    def stands(token: int, threshold: float, greedy: bool) -> bool:
        relaxed = BildRollback(threshold, greedy=greedy).relax(scores, torch.tensor([[token]]), one)
        assert torch.equal(relaxed[:, 1], scores[:, 1])
        return bool(relaxed[0, 0, token] == 0)

    assert stands(1, math.log(4), False) and not stands(1, math.log(4) - 1e-9, False)
    assert stands(0, 0.0, True) and not stands(0, 0.0, False)


class HostLoop:
    """Puts a `ModelDrafter` into transformers' own assisted loop, and remembers what it drafted."""

    def __init__(self, rule: StopRule, rollback: BildRollback | None) -> None:
        self.rule = rule
        self.rollback = rollback
        self.lengths: list[int] = []

    def generator(
        self,
        generation_config: Any,
        input_ids: Tensor,
        inputs_tensor: Tensor,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        assistant_model: PreTrainedModel,
        **_: Any,
    ) -> ModelDrafter:
        """Stands in for `GenerationMixin._get_candidate_generator`."""
        own = LogitsProcessorList(p for p in logits_processor if p is not self.rollback)
        capacity = generation_config.max_length + self.rule.limit
        kwargs = draft_inputs(assistant_model, dict(model_kwargs), input_ids, inputs_tensor)
        drafter = ModelDrafter(
            runner_for(assistant_model, kwargs, input_ids, capacity),
            HostProcessors(own, PAD),
            self.rule,
            vocabulary=VOCABULARY,
            eos_tokens=frozenset({EOS}),
            max_length=generation_config.max_length,
            rollback=self.rollback,
        )
        observe = drafter.observe

        def remember(finished: Round) -> None:
            self.lengths.append(finished.drafted[0])
            observe(finished)

        drafter.observe = remember  # type: ignore[method-assign]
        return drafter


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3, "min_new_tokens": 6}], ids=["bare", "processors"])
@pytest.mark.parametrize("strategy", ["speculative", "bild"])
def test_the_parts_work_in_transformers_own_loop(family: Family, strategy: str, settings: dict, monkeypatch) -> None:
    """Batch 1, greedy: the same tokens there as in our loop."""
    thresholds = {"fallback_threshold": 0.1, "rollback_threshold": 4.0} if strategy == "bild" else {}
    changed = []
    for row in range(4):
        inputs = {**family.row(row), "do_sample": False, "max_new_tokens": NEW_TOKENS, **settings}
        ours = SpeculativeDecoding(family.draft, strategy, num_assistant_tokens=4, **thresholds)
        expected = family.target.generate(**inputs, custom_generate=ours)
        rollback = BildRollback(4.0, greedy=True) if strategy == "bild" else None
        host = HostLoop(Fallback(4, 0.1) if strategy == "bild" else StopRule(4), rollback)
        with monkeypatch.context() as patch:
            patch.setattr(family.target, "_get_candidate_generator", host.generator, raising=False)
            theirs = family.target.generate(
                **inputs,
                assistant_model=family.draft,
                logits_processor=LogitsProcessorList([rollback] if rollback else []),
            )
        assert torch.equal(theirs, expected)
        assert host.lengths == [r.drafted[0] for r in ours.stats.rounds]
        changed.append(not torch.equal(expected, family.target.generate(**inputs)))
    assert any(changed) == (strategy == "bild")
