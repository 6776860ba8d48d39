"""Sampling is exact in every pair of settings: whole outputs against the target's distribution, enumerated.

Covered are strategies at their lossless limits, both verifications, drafters, stop rules, processors, ends of text,
batches, caches and engines. Any two values that can meet do so in at least one combination (a pairwise covering
array). A batch has rows of three prompts of different lengths. In the engine "captured", what a CUDA graph would
capture is just called; in "compiled", what inductor would compile is interpreted operation by operation. That
inductor's code computes the same is shown in `test_prepared_rounds.py`, model families in `test_identity.py`.

Left out are the combinations named in `EXCLUDED`: calls that the package refuses, and settings that have no effect.

The odds of a false failure, over all tests of this file, are at most 1e-6 for a new seed; the seeds are fixed. The
bound holds for any number of samples (Agrawal 2020, arXiv 1904.02291, theorem 1.2), see `odds`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from helpers import sampled_outputs
from helpers.copies import copy_wherever_possible
from helpers.distant import drafting_apart
from helpers.interpreted_steps import interpret_compiled_steps
from helpers.sampled_outputs import (
    AXES,
    COMBINATIONS,
    CONFIDENCE,
    ENDS,
    EXCLUDED,
    FALSE_FAILURE,
    PREPARED,
    PROCESSORS,
    PROMPTS,
    SAME_SEED,
    STOPS,
    STRATEGIES,
    Combination,
    Draws,
    exact,
    models,
    odds_of_independence,
    odds_of_outputs,
)
from torch import Tensor

import hf_specdec
from hf_specdec import decoding
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.models import recorded_passes, static_runner
from hf_specdec.prepared import cuda_graphs, lap_timer, prepared_rounds, round_steps
from hf_specdec.prepared.prepared_rounds import PreparedRounds
from hf_specdec.rules import sampling, verification
from hf_specdec.rules.verification import SAMPLING_RULES, Verification


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Combination], list[int]]]:
    """Puts a combination's engine, drafter and clock in force; what is returned grows as the engine runs."""
    ran: list[int] = []
    copy_wherever_possible(monkeypatch)
    # Eta sampling checks scores on the host, unless the process has used torch's compiler.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    numbers, seconds = random.Random(0), [0.0]

    def clock() -> float:
        seconds[0] += numbers.random()
        return seconds[0]

    for module in (decoding, prepared_rounds, lap_timer):
        monkeypatch.setattr(module, "perf_counter", clock)

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (ran.append(1), original(*args))[1])

    def use(c: Combination) -> list[int]:
        if c.drafter == "other device":
            drafting_apart(monkeypatch)
        if c.engine == "eager":
            monkeypatch.setattr(static_runner, "recorded_passes", lambda model, kernels: None)
        elif c.engine == "recorded":
            monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 1)
            count(recorded_passes, "replay")
        else:
            count(PreparedRounds, "make_round")
            monkeypatch.setattr(cuda_graphs, "captures", lambda device: c.engine == "captured")
        return ran

    interpret_compiled_steps(monkeypatch)
    yield use
    hf_specdec.release()


@pytest.mark.parametrize("c", COMBINATIONS, ids=", ".join)
def test_outputs_are_distributed_as_the_target_s_own(c: Combination, engines) -> None:
    """Rows are independent, and a seed reproduces them (every third is looked at)."""
    ran = engines(c)
    draws = Draws(c)
    assert odds_of_outputs(draws, c) > FALSE_FAILURE
    if c.batch == "rows":
        assert odds_of_independence(draws, c) > FALSE_FAILURE
    if c.batch == "rows" and c.drafter != "none":  # some prompts alone get no draft that is accepted
        assert 0 < draws.accepted < draws.drafted
    assert bool(ran) == (c.engine != "eager")
    if "auto" not in c.stop and COMBINATIONS.index(c) % 3 == 0:  # automatic lengths depend on times
        same = SAME_SEED[c.batch]
        assert Draws(c, calls=same).outputs == draws.outputs[:same]
        assert Draws(c, seed=2, calls=same).outputs != draws.outputs[:same]


def test_so_they_are_where_drafts_end_by_confidence(engines, monkeypatch) -> None:
    monkeypatch.setitem(STOPS, "entropy", CONFIDENCE)
    assert odds_of(Combination(stop="entropy", processor="top_k"), engines) > FALSE_FAILURE


def odds_of(c: Combination, engines: Callable[[Combination], list[int]]) -> float:
    """The odds of a combination's outputs, after a look that its engine has run."""
    ran = engines(c)
    draws = Draws(c)
    assert bool(ran) == (c.engine != "eager")
    return odds_of_outputs(draws, c)


def accepts_everything(
    target_probs: Tensor, tokens: Tensor, lengths: Tensor, draft_probs: Tensor | None, uniforms: Tensor | None
) -> Verification:
    """A rule that keeps each draft whole."""
    assert uniforms is not None
    weights = target_probs[torch.arange(len(lengths)), lengths]
    overlap = torch.ones(tokens.shape)
    return Verification(lengths, sampling.draw(weights, uniforms[:, -1]), overlap)


@pytest.mark.parametrize(
    "c",
    [
        Combination(),
        Combination(engine="recorded", end="no end"),
        Combination(engine="captured", cache="static"),
        Combination(engine="compiled"),
        Combination(strategy="typical", drafter="hybrid", processor="repetition", cache="off"),
        Combination(drafter="suffix", batch="one", stop="auto"),
        Combination(drafter="other pieces", processor="min_p"),
    ],
    ids=", ".join,
)
def test_control_a_rule_that_accepts_everything_fails(c: Combination, engines, monkeypatch) -> None:
    """In each engine, with each batch, and by drafts of several kinds."""
    monkeypatch.setitem(SAMPLING_RULES, c.verification, accepts_everything)
    assert odds_of(c, engines) < FALSE_FAILURE


@pytest.mark.parametrize("drafter", ["model", "suffix"])
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_control_rejections_replaced_by_any_token_of_the_target_fail(rule: str, drafter: str, engines, monkeypatch):
    """Instead of by one of the residual distribution."""

    def whole(target_probs: Tensor, tokens: Tensor, lengths: Tensor, draft_probs: Any, n_accepted: Tensor, *_: Any):
        return target_probs[torch.arange(len(n_accepted)), n_accepted]

    monkeypatch.setattr(verification, "_residual", whole)
    assert odds_of(Combination(verification=rule, drafter=drafter), engines) < FALSE_FAILURE


def stop_at_the_token(monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
    """In all rounds, a draft ends with one of the tokens, which is left out of it or kept."""
    token = PROMPTS[0][1]
    outcome, lengths = ModelDrafter._outcome, round_steps.draft_lengths

    def general(self: ModelDrafter, probs: Tensor, choice: Tensor) -> Tensor:
        found = outcome(self, probs, choice)
        found[1 if before else 2] |= choice == token
        return found

    def prepared(plan: Any, limits: Tensor, tokens: Any, *ends: Any) -> tuple[Tensor, Tensor]:
        seen = [drafted.squeeze(1) == token for drafted in tokens]
        at = 0 if before else 1
        known = ends[at] or [torch.zeros_like(rows) for rows in seen]
        both = [one | other for one, other in zip(seen, known, strict=True)]
        return lengths(plan, limits, tokens, *(both if place == at else end for place, end in enumerate(ends)))

    monkeypatch.setattr(ModelDrafter, "_outcome", general)
    monkeypatch.setattr(round_steps, "draft_lengths", prepared)


STOPPED = [Combination(stop="auto")] + [
    Combination(stop="entropy", engine=engine, cache="static") for engine in PREPARED
]


@pytest.mark.parametrize("c", STOPPED, ids=", ".join)
def test_control_a_stop_before_a_token_that_it_has_seen_fails(c: Combination, engines, monkeypatch) -> None:
    """Where the draft has drawn that token, the target draws another."""
    stop_at_the_token(monkeypatch, before=True)
    monkeypatch.setattr(sampled_outputs, "CALLS", 24)
    assert odds_of(c, engines) < FALSE_FAILURE


@pytest.mark.parametrize("c", STOPPED, ids=", ".join)
def test_a_stop_behind_a_token_may_have_seen_it(c: Combination, engines, monkeypatch) -> None:
    stop_at_the_token(monkeypatch, before=False)
    assert odds_of(c, engines) > FALSE_FAILURE


def test_control_a_draft_judged_by_unprocessed_scores_fails(engines, monkeypatch) -> None:
    """Drawn from the processed distribution, handed out with the raw one: silently not lossless."""
    choose = ModelDrafter._choose

    def raw(self: ModelDrafter, ids: Tensor, lengths: Any, logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return sampling.probabilities(logits.float()), choose(self, ids, lengths, logits, *rest)[1]

    monkeypatch.setattr(ModelDrafter, "_choose", raw)
    assert odds_of(Combination(processor="top_p"), engines) < FALSE_FAILURE


def test_control_drafts_that_only_claim_to_be_drawn_fail(engines, monkeypatch) -> None:
    """The most probable tokens, handed out with the distributions that they were not drawn from."""
    propose = ModelDrafter.propose

    def claim(self: ModelDrafter, *args: Any) -> DraftProposal:
        self.do_sample = False
        return propose(self, *args)

    monkeypatch.setattr(ModelDrafter, "propose", claim)
    assert odds_of(Combination(), engines) < FALSE_FAILURE


@pytest.mark.parametrize(
    ("strategy", "rule", "setting", "value"),
    [
        ("bild", "token", "rollback_threshold", 6.0),
        ("lenient", "block", "lenience", 0.4),
        ("typical", "token", "posterior_threshold", 0.09),
        ("ensemble", "block", "assistant_ensemble_weight", 0.4),
    ],
)
def test_control_strategies_beyond_their_limits_fail(
    strategy: str, setting: str, value: float, rule: str, engines, monkeypatch
) -> None:
    monkeypatch.setitem(STRATEGIES[strategy], setting, value)
    assert odds_of(Combination(strategy, rule), engines) < FALSE_FAILURE


def test_control_one_number_for_all_rows_passes_row_by_row_and_fails_for_pairs(engines, monkeypatch) -> None:
    def shared(*shape: int, device: torch.device) -> Tensor:
        return torch.rand(1, *shape[1:], device=device).expand(shape)

    monkeypatch.setattr(sampling, "uniforms", shared)
    c = Combination(drafter="none", end="no end")
    engines(c)
    monkeypatch.setattr(sampled_outputs, "ROWS", len(PROMPTS))
    monkeypatch.setattr(sampled_outputs, "CALLS", 120)
    draws = Draws(c)
    assert odds_of_outputs(draws, c) > FALSE_FAILURE
    assert odds_of_independence(draws, c) < FALSE_FAILURE


def test_control_numbers_that_the_seed_does_not_rule_are_noticed(engines, monkeypatch) -> None:
    own = torch.Generator().manual_seed(0)
    monkeypatch.setattr(sampling, "uniforms", lambda *shape, device: torch.rand(shape, generator=own))
    engines(Combination())
    assert Draws(Combination(), calls=1).outputs != Draws(Combination(), calls=1).outputs


def test_the_yardstick_passes_plain_generate_and_fails_the_draft_s_own_distribution() -> None:
    """The enumeration agrees with what transformers samples."""
    c = Combination(processor="top_p")
    assert odds_of_outputs(Draws(c, plain=models()["target"]), c) > FALSE_FAILURE
    assert odds_of_outputs(Draws(c, plain=models()["model"]), c) < FALSE_FAILURE


@pytest.mark.parametrize("stop", ["auto", "auto, entropy"])
def test_automatic_lengths_go_on_where_compiling_fails(stop: str, engines) -> None:
    """Eta sampling reads scores on the host, which no compiled step can."""
    c = Combination(stop=stop, processor="eta", engine="compiled")
    engines(c)
    with pytest.warns(UserWarning, match="decoding goes on without"):
        draws = Draws(c)
    assert odds_of_outputs(draws, c) > FALSE_FAILURE
    assert 0 < draws.accepted < draws.drafted


def test_each_setting_matters() -> None:
    """Every processor changes the distribution, and an end of text occurs."""
    distributions = [exact(0, processor, end) for processor in PROCESSORS for end in ENDS]
    assert all(one != other for one, other in combinations(distributions, 2))
    assert all(sum(d.values()) == pytest.approx(1.0) for d in distributions)


def test_every_value_occurs_and_every_exclusion_excludes() -> None:
    """Without one of the exclusions, more combinations would be allowed."""
    assert [set(values) for values in zip(*COMBINATIONS, strict=True)] == [set(axis) for axis in AXES]
    only = {name: 0 for name in EXCLUDED}
    for row in product(*AXES):
        broken = [name for name, excludes in EXCLUDED.items() if excludes(Combination(*row))]
        if len(broken) == 1:
            only[broken[0]] += 1
    assert all(only.values())
