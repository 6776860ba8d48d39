"""Models with recurrent layers, as target and as draft: greedy speculation gives plain `generate`'s tokens."""

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.distributions import FALSE_FAILURE, chi_square_odds, replayed, sampled
from helpers.families import pair, prompts
from helpers.identity import speculated
from helpers.models import EOS as TOY_EOS
from helpers.models import PAD as TOY_PAD
from helpers.models import Passes
from helpers.pairwise import pairwise
from helpers.patches import copy_wherever_possible, noted
from helpers.recurrent_families import FAMILIES, model, noisy
from transformers import PreTrainedModel, TemperatureLogitsWarper

import hf_specdec
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.models import recorded_passes, recurrences, recurrent_states
from hf_specdec.models.cache_names import CACHE_NAME, cache_argument, cache_of
from hf_specdec.models.cache_rollback import new_cache
from hf_specdec.models.recurrent_runner import RecurrentRunner
from hf_specdec.prepared import compiled_step
from hf_specdec.prepared.engine import Engine

NEW_TOKENS = 12
BILD = {"generation_strategy": "bild", "fallback_threshold": 0.1, "rollback_threshold": 0.0}


def check_identity(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    call: dict[str, Any] | None = None,
    instead: dict[str, Any] | None = None,
    plain: torch.Tensor | None = None,
    **settings: Any,
) -> Any:
    """Compare speculative greedy output with plain, of a batch of four by default; returns the statistics.

    Args:
        instead: what the speculative call has besides, or in place of its arguments.
        plain: the tokens of plain `generate`, where they are known.
    """
    call = call or {**prompts(4), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    if plain is None:
        plain = target.generate(**call)
    settings = {"generation_strategy": "speculative", **settings, **(instead or {})}
    with Passes(target) as passes:
        out = speculated(target, draft, **{**call, "return_dict_in_generate": True, **settings})
    assert torch.equal(out.sequences, plain)
    if draft is not target:
        assert passes.count == len(out.speculation.rounds), "one target pass a round, for the whole batch"
    return out.speculation


UNEVEN = ("Mamba", "FalconMamba", "Jamba", "Bamba")  # three of them start a scan over several tokens anew
DRAFTERS: dict[str, dict[str, Any]] = {
    "noisy": {},
    "bild": BILD,
    "itself": {},
    "attention only": {},
    "suffix": {"drafter": "suffix"},
    "hybrid": {"drafter": "hybrid"},
    "of an attention target": {},
}
PROMPTS = ("one token", "several tokens", "end of text", "continued")


@functools.cache
def situations() -> list[tuple[Any, ...]]:
    """Rows in which any two of these values meet."""
    return pairwise((*FAMILIES, *UNEVEN), tuple(DRAFTERS), PROMPTS, (1, 4), (1, 4, 7))


@pytest.mark.parametrize("family", [*FAMILIES, *UNEVEN])
def test_greedy_tokens_are_those_of_plain_generate(family: str, monkeypatch) -> None:
    """Where look-up drafts, the draft model's rows fall behind by different numbers of tokens."""
    copy_wherever_possible(monkeypatch)
    recurrent, attention = model(family), pair("llama")[0]
    drafts = dict.fromkeys(DRAFTERS, noisy(recurrent))
    drafts |= {"itself": recurrent, "attention only": attention, "of an attention target": recurrent}
    rates: list[float | None] = []
    plain: dict[Any, torch.Tensor] = {}
    for drafter, prompt, rows, lookahead in (row[1:] for row in situations() if row[0] == family):
        target = attention if drafter == "of an attention target" else recurrent
        draft, case = drafts[drafter], (target, prompt, rows)
        call, instead = prompt_of(prompt, target, rows)
        plain[case] = plain[case] if case in plain else target.generate(**call)
        settings = {"num_assistant_tokens": lookahead, **DRAFTERS[drafter]}
        stats = check_identity(target, draft, call, instead, plain[case], **settings)
        assert drafter != "itself" or stats.acceptance_rate == 1.0, case
        rates.append(stats.acceptance_rate)
    assert any(rate is not None and 0.1 < rate < 0.9 for rate in rates), "some drafts are rejected, some accepted"


def prompt_of(kind: str, target: PreTrainedModel, batch_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a call, and what the speculative one has instead: the text's beginning in a cache."""
    inputs = {**prompts(batch_size), "max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    if kind == "one token":
        return {**inputs, **{name: inputs[name][:, -1:] for name in ("input_ids", "attention_mask")}}, {}
    if kind == "end of text":
        return {**inputs, "eos_token_id": int(target.generate(**inputs)[0, 11 + 4])}, {}
    if kind == "continued" and target.config.model_type not in ("mamba", "mamba2", "falcon_mamba"):
        # These refuse a cache with a text in it.
        begun = target.generate(**{**inputs, "max_new_tokens": 5}, return_dict_in_generate=True)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 5), value=1)
        return {**inputs, "input_ids": begun.sequences, "attention_mask": mask}, {CACHE_NAME: cache_of(begun)}
    return inputs, {}


@pytest.mark.parametrize(
    ("family", "part"),
    [(family, part) for family in ("Qwen3_5Text", "Mamba2", "FalconH1") for part in ("_picked", "_windows")]
    + [("Lfm2", "_windows")],
)
def test_control_states_that_stay_after_a_rejection_give_other_tokens(family: str, part: str, monkeypatch) -> None:
    """Those of recurrences, which LFM2 has none of, and those of convolutions."""
    rolled_back = getattr(recurrent_states, part)

    def stays(states: Any, counts: Sequence[int], *rest: Any) -> Any:
        return rolled_back(states, [0] * len(counts), *rest)

    monkeypatch.setattr(recurrent_states, part, stays)
    target = model(family)
    with pytest.raises(AssertionError):
        check_identity(target, noisy(target), num_assistant_tokens=4)


@pytest.mark.parametrize("family", ["Qwen3Next", "Lfm2"])
def test_the_cache_returned_can_be_continued_from(family: str) -> None:
    target = model(family)
    settings = {"do_sample": False, "eos_token_id": None}
    whole = target.generate(**prompts(1), **settings, max_new_tokens=24)
    plain = target.generate(**prompts(1), **settings, max_new_tokens=9, return_dict_in_generate=True)
    with hf_specdec.enable(target, assistant_model=noisy(target), generation_strategy="speculative"):
        first = target.generate(**prompts(1), **settings, max_new_tokens=9, return_dict_in_generate=True)
        for mine, theirs in zip(cache_of(first).layers, cache_of(plain).layers, strict=True):
            for name in ("keys", "values"):
                torch.testing.assert_close(getattr(mine, name, 0), getattr(theirs, name, 0), rtol=1e-4, atol=1e-4)
            for name in ("conv_states", "recurrent_states"):
                torch.testing.assert_close(getattr(mine, name, {}), getattr(theirs, name, {}), rtol=1e-4, atol=1e-4)
        second = target.generate(first.sequences, **settings, max_new_tokens=15, **{CACHE_NAME: cache_of(first)})
    assert torch.equal(second, whole)
    assert torch.equal(
        target.generate(first.sequences, **settings, max_new_tokens=15, **{CACHE_NAME: cache_of(plain)}), whole
    )


def test_a_cache_whose_rows_ended_far_apart_is_returned_empty() -> None:
    """The states of a row that goes on can't be taken back to where another ended; an empty cache is right, too."""
    target = model("Lfm2")
    inputs = prompts(4)
    plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    settings = {"do_sample": False, "eos_token_id": int(plain[0, 12]), "return_dict_in_generate": True}
    out = speculated(target, noisy(target), **inputs, **settings, max_new_tokens=NEW_TOKENS)
    assert cache_of(out).get_seq_length() == 0 and not cache_of(out).has_previous_state()


def test_a_call_that_breaks_off_leaves_a_cache_that_can_be_used() -> None:
    target = model("OlmoHybrid")
    settings = {"do_sample": False, "eos_token_id": None}
    whole = target.generate(**prompts(1), **settings, max_new_tokens=20)
    begun = target.generate(**prompts(1), **settings, max_new_tokens=4, return_dict_in_generate=True)
    cache, calls = cache_of(begun), []

    def broken(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    last = target.model.layers[-1].register_forward_pre_hook(broken)
    with pytest.raises(KeyboardInterrupt):
        speculated(target, noisy(target), begun.sequences, **settings, max_new_tokens=16, **{CACHE_NAME: cache})
    last.remove()
    assert torch.equal(target.generate(begun.sequences, **settings, max_new_tokens=16, **{CACHE_NAME: cache}), whole)


@pytest.mark.parametrize("lookahead", [1, 4])
def test_as_many_states_are_kept_as_documented(lookahead: int, monkeypatch) -> None:
    """The one before a pass over γ+1 tokens and those after each of them; not more for the draft."""
    kept = noted(monkeypatch, recurrent_states.RecurrentStates, "forget", lambda self, *_: max(map(len, self._kept)))
    target = model("Qwen3_5Text")
    check_identity(target, noisy(target), num_assistant_tokens=lookahead)
    assert max(kept[2:]) == lookahead + 2


def test_a_recurrent_draft_makes_one_more_pass_where_only_some_rows_accepted_all() -> None:
    target = model("OlmoHybrid")
    draft = noisy(target)
    with Passes(draft) as passes:
        rounds = check_identity(target, draft, num_assistant_tokens=2).rounds
    more = 0
    for before, after in itertools.pairwise(rounds):
        going_on = [row for row, count in enumerate(after.new_tokens) if count]
        more += len({before.accepted[row] == before.drafted[row] for row in going_on}) > 1 and any(after.drafted)
    assert passes.count == sum(one.draft_steps for one in rounds) + more and more > 2


@pytest.mark.filterwarnings("ignore:.*not needed here")
def test_passes_are_neither_recorded_nor_compiled(monkeypatch) -> None:
    begun: list[str] = []

    def begin(*_: Any, **__: Any) -> None:
        begun.append("recording or compiling")
        raise RuntimeError("not needed here")

    monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 1)
    monkeypatch.setattr(torch._C, "_create_graph_by_tracing", begin)
    monkeypatch.setattr(compiled_step, "compile_refusal", lambda device: None)
    monkeypatch.setattr(Engine, "prepare", begin)
    recurrent = [(target, noisy(target)) for target in map(model, ("Qwen3_5Text", "Mamba2", "Zamba2"))]
    for settings in ({}, {"compile": True}):
        for target, draft in (*recurrent, pair("llama")):  # the last is the control
            call = {**prompts(1), "max_new_tokens": 8, "do_sample": False}
            check_identity(target, draft, call, num_assistant_tokens=1, **settings)
            assert bool(begun) is (target.config.model_type == "llama")
        begun.clear()


def test_without_a_cache() -> None:
    target = model("FalconH1")
    check_identity(target, noisy(target), use_cache=False)


def test_samples_are_distributed_as_the_target_s_own() -> None:
    tiny = {"vocab_size": 5, "eos_token_id": TOY_EOS, "pad_token_id": TOY_PAD, "bos_token_id": None}
    target = model("FalconH1", dtype=torch.float32, **tiny)
    prompt, rows, calls = torch.tensor([[2, 3, 4, 2, 4, 3]]), 400, 5
    found = sampled((target, noisy(target, 0.4)), prompt, _as_they_are, rows, calls, num_assistant_tokens=2)
    counts = Counter(map(tuple, found.flatten(0, 1).tolist()))
    assert chi_square_odds(counts, replayed(target, prompt, _as_they_are), rows * calls) > FALSE_FAILURE
    assert 0.1 < hf_specdec.last_speculation(target).acceptance_rate < 0.95


def _as_they_are(target: PreTrainedModel) -> TemperatureLogitsWarper:
    return TemperatureLogitsWarper(1.0)


@pytest.mark.parametrize("family", ["Qwen3_5Text", "Jamba"])
def test_the_modules_of_transformers_are_as_before_after_each_pass(family: str) -> None:
    """Also where two threads record at once, one of which fails, and where a pass of no recorder comes between."""
    target = model(family)
    where = recurrences.places(target)
    before = [getattr(module, kind.many) for module, kind in where]
    inputs, inside = prompts(1), []

    def look(*_: Any) -> None:
        inside.append([getattr(module, kind.many) for module, kind in where] != before)

    hook = target.register_forward_pre_hook(look)
    check_identity(target, noisy(target))
    hook.remove()
    assert any(inside), "replaced during our passes"
    assert [getattr(module, kind.many) for module, kind in where] == before
    plain = target.generate(**inputs, max_new_tokens=8, do_sample=False)
    others, entered = Barrier(2), Barrier(2)

    def fails() -> None:
        try:
            with recurrences.recording(recurrences.Recorder((), 0), where):
                entered.wait(600)
                others.wait(600)
                raise KeyError
        except KeyError:
            pass

    thread = Thread(target=fails)
    thread.start()
    entered.wait(600)
    assert torch.equal(target.generate(**inputs, max_new_tokens=8, do_sample=False), plain)
    check_identity(target, noisy(target))
    others.wait(600)
    thread.join()
    assert where and [getattr(module, kind.many) for module, kind in where] == before


def test_a_prompt_with_pictures_and_the_token_behind_it_are_two_passes() -> None:
    """As of a draft in its first round: the recurrence over the one token runs by another function of the model."""
    target = model("Qwen3_5Text")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    given = {"use_cache": True, cache_argument(target): new_cache(target, "model", cross_attention=False)}
    runner = RecurrentRunner(target, given, ids[:, :4], 32, prompt_alone=True)
    with torch.no_grad():
        # The model's recurrence computes in float32.
        torch.testing.assert_close(runner.forward(ids, 1), target(ids).logits[:, -1:], atol=1e-4, rtol=0.0)
    assert runner.passes == 2


def test_what_all_rows_lack_is_read_in_one_pass_that_keeps_no_states() -> None:
    """A hybrid drafter's model may read its prompts only after rounds of copies, which rows accepted unevenly."""
    passes: list[tuple[int, int]] = []
    runner = SimpleNamespace(
        rewind=lambda lengths: None, forward=lambda tokens, count: passes.append((tokens.shape[1], count))
    )
    drafter = object.__new__(ModelDrafter)
    drafter.runner, drafter._rows, drafter._read = runner, (0, 1), [0, 0]  # type: ignore[assignment]
    drafter._catch_up(torch.zeros(2, 40, dtype=torch.long), [30, 34])
    assert passes == [(29, 1), (4, 4)] and drafter._read == [29, 33]
