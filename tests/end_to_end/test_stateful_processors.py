"""Processors that keep state see what plain `generate` shows them: each kept text once, in order, and nothing else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import families, recurrent_families
from helpers.models import VOCABULARY, Passes, prompts
from helpers.pairwise import pairwise
from helpers.stateful import PROCESSORS, Automaton, Counter, ForkableAutomaton, Journaled, SharedAutomaton, StopsByCount
from helpers.streamer import Streamer
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TopKLogitsWarper,
)

from hf_specdec import SpeculativeDecoding
from hf_specdec.host.processors import HostProcessors

CALL = {"do_sample": False, "max_new_tokens": 24}
Pair = tuple[PreTrainedModel, PreTrainedModel]


def repetitive(rows: int) -> dict[str, Tensor]:
    """Prompts in which look-ups match."""
    return {name: tensor.repeat(1, 3) for name, tensor in prompts(rows, length=7).items()}


def compare(
    pair: Pair,
    make: Callable[[list[Any]], dict[str, Any]],
    inputs: dict[str, Tensor],
    strategy: str = "speculative",
    **settings: Any,
) -> SpeculativeDecoding:
    """Plain and speculative `generate` give the same tokens and ask the same questions in the same order.

    Args:
        make: makes arguments of the call that write a journal.
    """
    decoding = SpeculativeDecoding(pair[1], strategy, **{"num_assistant_tokens": 4, **settings})
    found = []
    for custom in (None, decoding):
        journal: list[Any] = []
        call = {**CALL, **make(journal)}
        decoding.streamer = call.get("streamer")
        found.append((pair[0].generate(**inputs, **call, custom_generate=custom).tolist(), journal))
    (expected, asked), (output, answered) = found
    assert output == expected and answered == asked
    return decoding


HOW: dict[str, dict[str, Any]] = {
    **{drafter: {"drafter": drafter} for drafter in ("none", "suffix", "model", "hybrid")},
    "bild": {"strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.05},
    "lenient": {"strategy": "lenient", "lenience": 1.0},
    "typical": {"strategy": "typical", "posterior_threshold": math.inf},
    "ensemble": {"strategy": "ensemble", "assistant_ensemble_weight": 1.0},
    "entropy": {"entropy_threshold": 0.5},
    "auto": {"num_assistant_tokens": "auto"},
    "long": {"num_assistant_tokens": 20},
}


@pytest.mark.parametrize(("name", "how", "rows"), pairwise(tuple(PROCESSORS), tuple(HOW), (1, 4)))
def test_tokens_and_questions_are_plain_s(pair, name: str, how: str, rows: int) -> None:
    """With every drafter, strategy and stop rule."""
    decoding = compare(
        pair, lambda journal: {"logits_processor": [PROCESSORS[name](journal)]}, repetitive(rows), **HOW[how]
    )
    assert (decoding.stats.drafted > 0) == (how != "none")
    if how in ("model", "hybrid"):
        assert decoding.stats.accepted > 0


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mistral-sliding", "t5", "Mamba2"])
def test_so_they_are_with_every_kind_of_cache(family: str) -> None:
    if family == "Mamba2":
        target = recurrent_families.model(family)
        made = target, recurrent_families.noisy(target)
    else:
        made = families.pair(family)
    ids = torch.randint(3, 40, (3, 9), generator=torch.Generator().manual_seed(3))
    compare(
        made, lambda journal: {"logits_processor": [Counter(journal), ForkableAutomaton(journal)]}, {"input_ids": ids}
    )


def test_so_they_are_where_other_rounds_are_prepared(pair, fast_rounds) -> None:
    static = {"cache_implementation": "static", "generation_strategy": None}
    for rows in (1, 4):
        compare(pair, lambda journal: {"logits_processor": [ForkableAutomaton(journal)], **static}, prompts(rows))
    assert not fast_rounds, "none of these"


def test_a_known_processor_may_say_that_it_keeps_state() -> None:
    warper = TopKLogitsWarper(5)
    assert HostProcessors(LogitsProcessorList([warper])).serve_prepared_rounds
    warper.stateless = False
    made = HostProcessors(LogitsProcessorList([warper]))
    assert made.in_order and not made.serve_prepared_rounds and not made.portable and not made.for_drafts()


@pytest.mark.parametrize("kind", [None, Automaton, ForkableAutomaton])
@pytest.mark.parametrize("eos", [1, None])
@pytest.mark.parametrize("rows", [1, 4])
def test_processors_criteria_and_streamers_take_turns_as_in_plain(
    pair, rows: int, eos: int | None, kind: type | None
) -> None:
    """A criterion ends rows within a round, and processors see their padding from the next column on."""

    def make(journal: list[Any]) -> dict[str, Any]:
        return {
            "logits_processor": [] if kind is None else [kind(journal)],
            "stopping_criteria": StoppingCriteriaList([StopsByCount(journal)]),
            "streamer": Streamer(calls=journal),
            "eos_token_id": eos,
        }

    decoding = compare(pair, make, prompts(rows))
    assert decoding.stats is not None and decoding.stats.accepted > 0


def test_drafts_pass_through_known_processors_and_forks(pair) -> None:
    """The others would spoil them; what passes makes them better."""
    accepted = {}
    for kind in (Automaton, ForkableAutomaton):
        call = {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.3), kind()], **CALL, "max_new_tokens": 40}
        decoding = SpeculativeDecoding(pair[1])
        pair[0].generate(**prompts(1), **call, eos_token_id=None, custom_generate=decoding)
        accepted[kind] = decoding.stats.acceptance_rate
    assert accepted[ForkableAutomaton] > 2 * accepted[Automaton] > 0


def test_a_batch_advances_by_what_all_rows_accept(pair) -> None:
    decoding = SpeculativeDecoding(pair[1])
    call = {**CALL, "eos_token_id": None, "logits_processor": [ForkableAutomaton()]}
    with Passes(pair[0]) as passes:
        pair[0].generate(**prompts(3), **call, custom_generate=decoding)
    rounds = decoding.stats.rounds
    assert passes.count == len(rounds) < CALL["max_new_tokens"]
    assert all(len(set(r.new_tokens)) == 1 for r in rounds)
    cut_short = [r for r in rounds if len(set(r.accepted)) > 1]
    assert cut_short, "or the test says little"
    # A row that others cut short has drafts that nothing rejected.
    rows = [row for r in rounds for row in zip(r.accepted, r.drafted, r.new_tokens, strict=True)]
    rejected = sum(a < d and n > a for a, d, n in rows)
    assert decoding.stats.alpha == pytest.approx(decoding.stats.accepted / (decoding.stats.accepted + rejected))


class Unlisted(Journaled):
    """Adds a bias that depends on the last token, and says that it keeps no state: it may see drafts."""

    stateless = True

    def process(self, ids: Tensor, scores: Tensor) -> Tensor:
        """See `Journaled.process`."""
        return scores + 2.0 * ((torch.arange(scores.shape[1]) + ids[:, -1:]) % 4 == 0)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_processor_that_says_it_is_stateless_sees_drafts_too(pair, rows: int) -> None:
    """So rows of a batch advance by themselves."""
    processors = [Unlisted(), Unlisted()]
    decoding = SpeculativeDecoding(pair[1])
    plain, ours = (
        pair[0].generate(**prompts(rows), **CALL, logits_processor=[processor], custom_generate=custom)
        for processor, custom in zip(processors, (None, decoding), strict=True)
    )
    assert torch.equal(plain, ours) and len(processors[1].journal) > len(processors[0].journal)
    assert rows == 1 or any(len(set(r.new_tokens)) > 1 for r in decoding.stats.rounds)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", [Counter, Automaton])
def test_control_one_that_keeps_state_and_says_it_does_not(pair, rows: int, kind: type, monkeypatch) -> None:
    """What would happen to all of them if drafts passed through: other tokens, or a failed assertion."""
    monkeypatch.setattr(kind, "stateless", True, raising=False)
    with pytest.raises(AssertionError):
        compare(pair, lambda journal: {"logits_processor": [kind(journal)]}, prompts(rows))


def test_control_forks_that_share_state(pair) -> None:
    with pytest.raises(AssertionError, match="out of order"):
        compare(pair, lambda journal: {"logits_processor": [SharedAutomaton(journal)]}, prompts(1))


def may_follow(questions: int) -> list[int]:
    return [token for token in range(1, VOCABULARY) if token % 3 != questions % 3]


class CountedWalk:
    """A `prefix_allowed_tokens_fn` that follows its own count of questions instead of the text."""

    def __init__(self, journal: list[Any] | None = None) -> None:
        self.journal: list[Any] = [] if journal is None else journal
        self.questions = 0

    def __call__(self, row: int, text: Tensor) -> list[int]:
        self.questions += 1
        self.journal.append((row, text.tolist()))
        return may_follow(self.questions)


@pytest.mark.parametrize(("drafter", "rows"), [("suffix", 1), ("model", 4)])
def test_a_constraint_that_says_it_keeps_state_is_asked_as_in_plain(pair, rows: int, drafter: str, monkeypatch) -> None:
    monkeypatch.setattr(CountedWalk, "stateless", False, raising=False)
    inputs = repetitive(rows)
    compare(pair, lambda journal: {"prefix_allowed_tokens_fn": CountedWalk(journal)}, inputs, drafter=drafter)


def counted() -> Callable[[int, Tensor], list[int]]:
    questions = 0

    def allowed(row: int, text: Tensor) -> list[int]:
        nonlocal questions
        questions += 1
        return may_follow(questions)

    return allowed


def counted_in_a_default_value() -> Callable[[int, Tensor], list[int]]:
    def allowed(row: int, text: Tensor, questions: dict[str, int] = {"asked": 0}) -> list[int]:  # noqa: B006
        questions["asked"] += 1
        return may_follow(questions["asked"])

    return allowed


def counted_in_a_list() -> Callable[[int, Tensor], list[int]]:
    questions = [0]

    def allowed(row: int, text: Tensor) -> list[int]:
        questions[0] += 1
        return may_follow(questions[0])

    return allowed


ASKED = 0


def counted_in_its_module(row: int, text: Tensor) -> list[int]:
    global ASKED
    ASKED += 1
    return may_follow(ASKED)


COUNTING: dict[str, Callable[[], Any]] = {
    "object": CountedWalk,
    "closure": counted,
    "method": lambda: CountedWalk().__call__,
    "list": counted_in_a_list,
    "default value": counted_in_a_default_value,
    "module": lambda: counted_in_its_module,
}


@pytest.mark.parametrize("place", COUNTING)
def test_a_constraint_that_keeps_state_and_does_not_say_so_is_refused(pair, place: str) -> None:
    """By its contract it is a function of its arguments, and is asked about drafts."""
    call = {**prompts(1), **CALL, "prefix_allowed_tokens_fn": COUNTING[place]()}
    with pytest.raises(ValueError, match=r"prefix_allowed_tokens_fn=.*keeps state.*stateless=False.*stateless=True"):
        pair[0].generate(**call, custom_generate=SpeculativeDecoding(pair[1]))


def test_a_constraint_may_prepare_itself_and_remember_its_answers(pair) -> None:
    """And do anything else if it says that its answers depend on its arguments alone."""

    class Prepared:
        classes: dict[int, list[int]] | None = None

        def __call__(self, row: int, text: Tensor) -> list[int]:
            if self.classes is None:
                self.classes = {rest: [t for t in range(1, VOCABULARY) if t % 3 != rest] for rest in range(3)}
            return self.classes[int(text[-1]) % 3]

    class Counts(Prepared):
        stateless, questions = True, 0

        def __call__(self, row: int, text: Tensor) -> list[int]:
            self.questions += 1
            return super().__call__(row, text)

    class Remembers(Prepared):
        def __init__(self) -> None:
            self.answers: dict[tuple[int, ...], int] = {}

        def __call__(self, row: int, text: Tensor) -> list[int]:
            self.answers[tuple(text.tolist())] = int(text[-1]) % 3
            return super().__call__(row, text)

    call = {**repetitive(1), **CALL}
    for allowed in (Prepared(), Remembers(), Counts(), Counts().__call__):
        decoding = SpeculativeDecoding(pair[1])
        plain, ours = (
            pair[0].generate(**call, prefix_allowed_tokens_fn=allowed, custom_generate=custom)
            for custom in (None, decoding)
        )
        assert torch.equal(plain, ours)
        assert decoding.stats is not None and decoding.stats.accepted > 0


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("settings", [
    {"guidance_scale": 1.7},
    {"guidance_scale": 1.7, "use_cache": False},
    {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 9, 11], context_history_size=8)},
], ids=["guidance", "guidance without a cache", "watermark"])  # fmt: skip
def test_guidance_and_watermarks_give_plain_s_tokens(pair, rows: int, settings: dict[str, Any]) -> None:
    compare(pair, lambda journal: settings, prompts(rows))
    expected, without = (pair[0].generate(**prompts(rows), **CALL, **given) for given in (settings, {}))
    assert not torch.equal(expected, without), "or the test says little"
