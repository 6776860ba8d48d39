"""Rows that have ended are left out of passes over the per-row static cache, and nothing else changes by it."""

import itertools
from typing import Any

import pytest
import torch
from helpers.families import PAD, VOCABULARY, exact_dtype, pair, prompts
from helpers.pairwise import pairwise
from helpers.patches import copy_wherever_possible
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_specdec import Round, SpeculativeDecoding
from hf_specdec.models.cache_names import CACHE_NAME, cache_of
from hf_specdec.models.static_cache import RowsCache
from hf_specdec.models.static_runner import StaticRunner

ROWS, NEW_TOKENS = 5, 30
LEFT_OUT = ["llama", "mistral-sliding", "gemma2", "gpt2", "opt"]
FED_TO_THE_END = ["bloom", "t5"]
DRAFTERS: dict[str, dict[str, Any]] = {
    "model": {},
    "bild": {"strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.2},
    "hybrid": {"drafter": "hybrid"},
    "suffix": {"drafter": "suffix"},
    "auto": {"num_assistant_tokens": "auto"},
    "entropy": {"entropy_threshold": 0.5},
}


def ends_apart(new: Tensor, first: int) -> list[int]:
    """Two tokens that, as EOS, end rows `[B, n]` at as many places as can be, the earliest after `first` tokens."""

    def ends(eos: tuple[int, ...]) -> list[int]:
        return [next((n for n, token in enumerate(row, 1) if token in eos), len(row)) for row in new.tolist()]

    pairs = itertools.combinations(range(3, VOCABULARY), 2)
    return list(max(pairs, key=lambda eos: (min(ends(eos)) == first, len(set(ends(eos))))))


def ragged_call(family: str, first: int = 4, rows: int = ROWS) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A pair, its left-padded prompts, and a greedy call whose rows end apart."""
    target, draft = pair(family, dtype=exact_dtype(family, rows))
    inputs, call = prompts(rows), {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    whole = target.generate(**inputs, **call, eos_token_id=None).sequences[:, -NEW_TOKENS:]
    return (target, draft), inputs, call | {"eos_token_id": ends_apart(whole, first)}


def rows_fed(model: PreTrainedModel) -> list[int]:
    """Fills up with how many rows each pass of a model holds, from now on."""
    passes: list[int] = []
    model.register_forward_hook(lambda _, __, output: passes.append(len(output.logits)))
    return passes


def live(rounds: list[Round]) -> list[int]:
    """Rows that had not ended, by round."""
    return [sum(n > 0 for n in finished.new_tokens) for finished in rounds]


def by_step(rows: list[int], rounds: list[Round]) -> list[int]:
    """The same by draft step."""
    return [n for n, finished in zip(rows, rounds, strict=True) for _ in range(finished.draft_steps)]


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {"cache_implementation": "static"}), *((family, {}) for family in LEFT_OUT + FED_TO_THE_END)],
)
def test_passes_of_both_models_hold_the_rows_that_have_not_ended(family: str, settings: dict[str, Any]) -> None:
    """Each row's tokens are those of its single run; models that can't be fed by rows are fed all of them."""
    (target, draft), inputs, call = ragged_call(family)
    plain = target.generate(**inputs, **call).sequences
    alone = [
        target.generate(**{key: value[row : row + 1] for key, value in inputs.items()}, **call).sequences[0]
        for row in range(ROWS)
    ]
    # A model that does not say what its passes are like is tried in its first call.
    target.generate(**inputs, **call | {"max_new_tokens": 2}, custom_generate=SpeculativeDecoding(draft))
    passes, draft_passes = rows_fed(target), rows_fed(draft)
    out = target.generate(**inputs, **call, **settings, custom_generate=SpeculativeDecoding(draft))
    rounds = out.speculation.rounds
    rows = live(rounds)
    assert rows[0] == ROWS and len(set(rows)) > 2, "rows end one after another"
    if family in FED_TO_THE_END:
        rows = [ROWS] * len(rounds)
    assert passes == rows and draft_passes == by_step(rows, rounds)
    assert torch.equal(out.sequences, plain)
    for text, single in zip(out.sequences, alone, strict=True):
        assert torch.equal(text[: len(single)], single) and (text[len(single) :] == PAD).all()


@pytest.mark.parametrize(
    ("drafts", "family", "first"), pairwise(tuple(DRAFTERS), ("llama", "mistral-sliding", "gemma2"), (1, 2, 6))
)
def test_rows_are_left_out_whoever_drafts(family: str, drafts: str, first: int, monkeypatch) -> None:
    """A hybrid's model and `auto`'s read in some rounds only: rows end before it has read them, or anything."""
    copy_wherever_possible(monkeypatch)
    (target, draft), inputs, call = ragged_call(family, first)
    plain = target.generate(**inputs, **call).sequences
    passes, draft_passes = rows_fed(target), rows_fed(draft)
    out = target.generate(**inputs, **call, custom_generate=SpeculativeDecoding(draft, **DRAFTERS[drafts]))
    rounds = out.speculation.rounds
    assert torch.equal(out.sequences, plain) and passes == live(rounds) and min(passes) < ROWS
    assert draft_passes == by_step(passes, rounds)


@pytest.mark.parametrize(("family", "first"), [*zip(LEFT_OUT, (1, 3, 7, 1, 3), strict=True), ("llama", 7)])
def test_the_returned_cache_holds_all_rows_as_plain_generate_s(family: str, first: int) -> None:
    """Up to the end of the shortest, which is as far as all rows have tokens of their own; also after the first."""
    (target, draft), inputs, call = ragged_call(family, first)
    out = target.generate(**inputs, **call, custom_generate=SpeculativeDecoding(draft))
    assert len(set(live(out.speculation.rounds))) > 2
    shortest = min(sum(r.new_tokens[row] for r in out.speculation.rounds) for row in range(ROWS))
    assert shortest == 1 or first > 1
    plain = target.generate(**inputs, **call | {"max_new_tokens": shortest})
    for mine, theirs in zip(cache_of(out).layers, cache_of(plain).layers, strict=True):
        length = inputs["input_ids"].shape[1] + shortest - 1
        assert mine.get_seq_length() == theirs.get_seq_length() == length
        # What stands in padding is read by nobody, and depends on how a pass was masked.
        seen = torch.ones(ROWS, length, dtype=torch.bool)
        seen[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"].bool()
        seen = seen[:, -mine.keys.shape[2] :]
        for ours, plains in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            torch.testing.assert_close(ours.transpose(1, 2)[seen], plains.transpose(1, 2)[seen])


class EndsRow(StoppingCriteria):
    """Ends the second row at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (torch.arange(len(input_ids)) == 1) & (input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("own", [False, True], ids=["static rows", "own dynamic cache"])
def test_the_returned_cache_ends_where_a_criterion_ends_a_row_amid_accepted_tokens(own: bool) -> None:
    target, _ = pair("llama")
    inputs, ends_at = prompts(ROWS), 14
    call: dict[str, Any] = {
        "do_sample": False,
        "return_dict_in_generate": True,
        "eos_token_id": VOCABULARY + 1,
        "stopping_criteria": StoppingCriteriaList([EndsRow(ends_at)]),
    }
    plain = target.generate(**inputs, **call, max_new_tokens=NEW_TOKENS)
    settings = {CACHE_NAME: DynamicCache(config=target.config)} if own else {}
    passes = rows_fed(target)
    decoding = SpeculativeDecoding(target, num_assistant_tokens=8)
    out = target.generate(**inputs, **call, **settings, max_new_tokens=NEW_TOKENS, custom_generate=decoding)
    assert torch.equal(out.sequences, plain.sequences) and (min(passes) == ROWS - 1) != own
    assert cache_of(out).get_seq_length() == ends_at - 1
    seen = inputs["attention_mask"].bool()
    seen = torch.cat([seen, seen.new_ones(ROWS, ends_at - 1 - seen.shape[1])], dim=1)
    for mine, theirs in zip(cache_of(out).layers, cache_of(plain).layers, strict=True):
        keys = theirs.keys[:, :, : ends_at - 1]
        torch.testing.assert_close(mine.keys.transpose(1, 2)[seen], keys.transpose(1, 2)[seen])


def test_statistics_and_scores_keep_all_rows_and_num_return_sequences_do() -> None:
    (target, draft), inputs, call = ragged_call("llama")
    call |= {"num_return_sequences": 2, "do_sample": True, "output_scores": True, "output_logits": True}
    plain = target.generate(**inputs, **call, top_k=1)
    passes = rows_fed(target)
    out = target.generate(**inputs, **call, top_k=1, custom_generate=SpeculativeDecoding(draft))
    assert torch.equal(out.sequences, plain.sequences)
    for ours, theirs in ((out.scores, plain.scores), (out.logits, plain.logits)):
        assert [step.shape for step in ours] == [step.shape for step in theirs]
    assert cache_of(out).layers[0].keys.shape[0] == 2 * ROWS
    # Without top_k it samples: rows of one prompt end apart, too.
    torch.manual_seed(0)
    sampled = target.generate(**inputs, **call, custom_generate=SpeculativeDecoding(draft)).speculation.rounds
    assert passes == live(out.speculation.rounds) + live(sampled)
    for finished in sampled:
        per_row = (finished.drafted, finished.accepted, finished.new_tokens, finished.overlap)
        assert [len(values) for values in per_row] == [2 * ROWS] * 4
        assert all(n or not any(rest) for *rest, n in zip(*per_row[:2], per_row[3], per_row[2], strict=True))


def runner(model: PreTrainedModel, rows: int) -> StaticRunner:
    inputs = prompts(rows)
    return StaticRunner(model, {**inputs, CACHE_NAME: RowsCache(model.config, 64)}, tuple(inputs["input_ids"].shape))


@pytest.mark.parametrize("early", [False, True], ids=["after", "before the first pass"])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gpt2"])
def test_rows_in_any_order_read_on_as_if_all_were_fed(family: str, early: bool) -> None:
    """Also a row whose place another has taken twice; what is left out has read nothing and answers zeros."""
    target, _ = pair(family)
    generator = torch.Generator().manual_seed(1)
    some, everyone = runner(target, 5), runner(target, 5)
    left = list(range(5))
    reads = [prompts(5)["input_ids"], *torch.randint(3, VOCABULARY, (4, 5, 3), generator=generator)]
    for number, (tokens, kept) in enumerate(zip(reads, ([0, 1, 2, 3, 4], [1, 2, 4], [1, 4], [4], [4]), strict=True)):
        if early:
            kept = [row for row in kept if row not in (0, 3)]
        if number:
            lengths = [max(n - row % 2, 0) for row, n in enumerate(everyone.read)]
            some.rewind(lengths)
            everyone.rewind(lengths)
        some.retain(kept)
        before, logits = list(some.read), some.forward(tokens, 1)
        wanted = everyone.forward(tokens, 1)
        torch.testing.assert_close(logits[kept], wanted[kept])
        out = [row for row in left if row not in kept]
        assert not logits[out].any() and logits.shape == wanted.shape
        assert [some.read[row] for row in out] == [before[row] for row in out]
        assert [some.read[row] for row in kept] == [everyone.read[row] for row in kept]
