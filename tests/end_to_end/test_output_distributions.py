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

import random
from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from helpers import sampled_outputs
from helpers import sampled_outputs as sampled
from helpers.pairwise import pairwise
from helpers.patches import choose_in_turn, copy_wherever_possible, drafting_apart, interpret_compiled_steps, returned
from torch import Tensor

import hf_specdec
from hf_specdec import decoding
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.models import recorded_passes, static_runner
from hf_specdec.prepared import cuda_graphs, engine, lap_timer, prepared_rounds, round_steps
from hf_specdec.prepared.engine import Engine
from hf_specdec.prepared.prepared_rounds import PreparedRounds
from hf_specdec.rules import sampling, verification
from hf_specdec.rules.verification import SAMPLING_RULES, Verification


@pytest.fixture(autouse=True)
def engines(monkeypatch) -> Iterator[Callable[[sampled.Combination], list[int]]]:
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

    def use(c: sampled.Combination) -> list[int]:
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


@pytest.mark.parametrize("c", sampled.COMBINATIONS, ids=", ".join)
def test_outputs_are_distributed_as_the_target_s_own(c: sampled.Combination, engines) -> None:
    """Rows are independent, and a seed reproduces them (every third is looked at)."""
    ran = engines(c)
    draws = sampled.judged(c)
    if c.batch == "rows" and c.drafter != "none":  # some prompts alone get no draft that is accepted
        assert 0 < draws.accepted < draws.drafted
    assert bool(ran) == (c.engine != "eager")
    if "auto" not in c.stop and sampled.COMBINATIONS.index(c) % 3 == 0:  # automatic lengths depend on times
        same = sampled.SAME_SEED[c.batch]
        assert sampled.Draws(c, calls=same).outputs == draws.outputs[:same]
        assert sampled.Draws(c, seed=2, calls=same).outputs != draws.outputs[:same]


def test_so_they_are_where_drafts_end_by_confidence(engines, monkeypatch) -> None:
    monkeypatch.setitem(sampled.STOPS, "entropy", sampled.CONFIDENCE)
    assert odds_of(sampled.Combination(stop="entropy", processor="top_k"), engines) > sampled.FALSE_FAILURE


def odds_of(c: sampled.Combination, engines: Callable[[sampled.Combination], list[int]]) -> float:
    """The odds of a combination's outputs, after a look that its engine has run."""
    ran = engines(c)
    draws = sampled.Draws(c)
    assert bool(ran) == (c.engine != "eager")
    return sampled.odds_of_outputs(draws, c)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_so_they_are_where_prepared_drafts_come_in_bursts(rule: str, engines, monkeypatch) -> None:
    """Their draws are independent of one another and of the verdict's."""
    monkeypatch.setattr(engine, "BURST", 1)
    monkeypatch.setitem(sampled.STOPS, "entropy", {"entropy_threshold": 0.1})
    steps = returned(monkeypatch, Engine, "run_draft", lambda made, *_: made[1])
    c = sampled.Combination(verification=rule, stop="entropy", engine="captured", cache="static")
    assert odds_of(c, engines) > sampled.FALSE_FAILURE and max(steps) == 2


@pytest.mark.parametrize(("rule", "stop"), [("token", "auto"), ("block", "auto"), ("token", "auto, entropy")])
def test_so_they_are_in_prepared_rounds_of_uneven_lengths(rule: str, stop: str, engines, monkeypatch) -> None:
    """Where a draft catches up with a plain round, and at the length that was prepared in a call before."""
    choose_in_turn(monkeypatch, 2, 0, first=0)
    steps = returned(monkeypatch, PreparedRounds, "make_round", lambda made, *_: made.draft_steps)
    c = sampled.Combination(verification=rule, stop=stop, engine="captured", cache="static")
    assert odds_of(c, engines) > sampled.FALSE_FAILURE and steps[:2] == [0, 2]


def accepts_everything(
    target_probs: Tensor, tokens: Tensor, lengths: Tensor, draft_probs: Tensor | None, uniforms: Tensor | None
) -> Verification:
    """A rule that keeps each draft whole."""
    weights = target_probs[torch.arange(len(lengths)), lengths]
    overlap = torch.ones(tokens.shape)
    return Verification(lengths, sampling.draw(weights, uniforms[:, -1]), overlap)


@pytest.mark.parametrize("c", [
    sampled.Combination(),
    sampled.Combination(engine="recorded", end="no end"),
    sampled.Combination(engine="captured", cache="static"),
    sampled.Combination(engine="compiled"),
    sampled.Combination(strategy="typical", drafter="hybrid", processor="repetition", cache="off"),
    sampled.Combination(drafter="suffix", batch="one", stop="auto"),
    sampled.Combination(drafter="other pieces", processor="min_p"),
], ids=", ".join)  # fmt: skip
def test_control_a_rule_that_accepts_everything_fails(c: sampled.Combination, engines, monkeypatch) -> None:
    """In each engine, with each batch, and by drafts of several kinds."""
    monkeypatch.setitem(SAMPLING_RULES, c.verification, accepts_everything)
    assert odds_of(c, engines) < sampled.FALSE_FAILURE


@pytest.mark.parametrize("drafter", ["model", "suffix"])
@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_control_rejections_replaced_by_any_token_of_the_target_fail(rule: str, drafter: str, engines, monkeypatch):
    """Instead of by one of the residual distribution."""

    def whole(target_probs: Tensor, tokens: Tensor, lengths: Tensor, draft_probs: Any, n_accepted: Tensor, *_: Any):
        return target_probs[torch.arange(len(n_accepted)), n_accepted]

    monkeypatch.setattr(verification, "_residual", whole)
    assert odds_of(sampled.Combination(verification=rule, drafter=drafter), engines) < sampled.FALSE_FAILURE


def stop_at_the_token(monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
    """In all rounds, a draft ends with one of the tokens, which is left out of it or kept."""
    token = sampled.PROMPTS[0][1]
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


STOPPED = [sampled.Combination(stop="auto")] + [
    sampled.Combination(stop="entropy", engine=engine, cache="static") for engine in sampled.PREPARED
]


@pytest.mark.parametrize("c", STOPPED, ids=", ".join)
def test_control_a_stop_before_a_token_that_it_has_seen_fails(c: sampled.Combination, engines, monkeypatch) -> None:
    """Where the draft has drawn that token, the target draws another."""
    stop_at_the_token(monkeypatch, before=True)
    monkeypatch.setattr(sampled_outputs, "CALLS", 24)
    assert odds_of(c, engines) < sampled.FALSE_FAILURE


@pytest.mark.parametrize("c", STOPPED, ids=", ".join)
def test_a_stop_behind_a_token_may_have_seen_it(c: sampled.Combination, engines, monkeypatch) -> None:
    stop_at_the_token(monkeypatch, before=False)
    assert odds_of(c, engines) > sampled.FALSE_FAILURE


def test_control_a_draft_judged_by_unprocessed_scores_fails(engines, monkeypatch) -> None:
    """Drawn from the processed distribution, handed out with the raw one: silently not lossless."""
    choose = ModelDrafter._choose

    def raw(self: ModelDrafter, ids: Tensor, lengths: Any, logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return sampling.probabilities(logits.float()), choose(self, ids, lengths, logits, *rest)[1]

    monkeypatch.setattr(ModelDrafter, "_choose", raw)
    assert odds_of(sampled.Combination(processor="top_p"), engines) < sampled.FALSE_FAILURE


def test_control_drafts_that_only_claim_to_be_drawn_fail(engines, monkeypatch) -> None:
    """The most probable tokens, handed out with the distributions that they were not drawn from."""
    propose = ModelDrafter.propose

    def claim(self: ModelDrafter, *args: Any) -> DraftProposal:
        self.do_sample = False
        return propose(self, *args)

    monkeypatch.setattr(ModelDrafter, "propose", claim)
    assert odds_of(sampled.Combination(), engines) < sampled.FALSE_FAILURE


@pytest.mark.parametrize(("strategy", "rule", "setting", "value"), [
    ("bild", "token", "rollback_threshold", 6.0),
    ("lenient", "block", "lenience", 0.4),
    ("typical", "token", "posterior_threshold", 0.09),
    ("ensemble", "block", "assistant_ensemble_weight", 0.4),
])  # fmt: skip
def test_control_strategies_beyond_their_limits_fail(
    strategy: str, setting: str, value: float, rule: str, engines, monkeypatch
) -> None:
    monkeypatch.setitem(sampled.STRATEGIES[strategy], setting, value)
    assert odds_of(sampled.Combination(strategy, rule), engines) < sampled.FALSE_FAILURE


def test_control_one_number_for_all_rows_passes_row_by_row_and_fails_for_pairs(engines, monkeypatch) -> None:
    def shared(*shape: int, device: torch.device) -> Tensor:
        return torch.rand(1, *shape[1:], device=device).expand(shape)

    monkeypatch.setattr(sampling, "uniforms", shared)
    c = sampled.Combination(drafter="none", end="no end")
    engines(c)
    monkeypatch.setattr(sampled_outputs, "ROWS", len(sampled.PROMPTS))
    monkeypatch.setattr(sampled_outputs, "CALLS", 120)
    draws = sampled.Draws(c)
    assert sampled.odds_of_outputs(draws, c) > sampled.FALSE_FAILURE
    assert sampled.odds_of_independence(draws, c) < sampled.FALSE_FAILURE


def test_control_one_number_for_all_draws_of_a_row_fails(engines, monkeypatch) -> None:
    draw = sampling.draw
    monkeypatch.setattr(sampling, "draw", lambda weights, uniform: draw(weights, uniform * 0 + 0.5))
    assert odds_of(sampled.Combination(engine="captured", cache="static"), engines) < sampled.FALSE_FAILURE


def test_control_numbers_that_the_seed_does_not_rule_are_noticed(engines, monkeypatch) -> None:
    own = torch.Generator().manual_seed(0)
    monkeypatch.setattr(sampling, "uniforms", lambda *shape, device: torch.rand(shape, generator=own))
    engines(sampled.Combination())
    assert (
        sampled.Draws(sampled.Combination(), calls=1).outputs != sampled.Draws(sampled.Combination(), calls=1).outputs
    )


def test_the_yardstick_passes_plain_generate_and_fails_the_draft_s_own_distribution() -> None:
    """The enumeration agrees with what transformers samples."""
    c = sampled.Combination(processor="top_p")
    assert sampled.odds_of_outputs(sampled.Draws(c, plain=sampled.models()["target"]), c) > sampled.FALSE_FAILURE
    assert sampled.odds_of_outputs(sampled.Draws(c, plain=sampled.models()["model"]), c) < sampled.FALSE_FAILURE


@pytest.mark.parametrize("stop", ["auto", "auto, entropy"])
def test_automatic_lengths_go_on_where_compiling_fails(stop: str, engines) -> None:
    """Eta sampling reads scores on the host, which no compiled step can."""
    c = sampled.Combination(stop=stop, processor="eta", engine="compiled")
    engines(c)
    with pytest.warns(UserWarning, match="decoding goes on without"):
        draws = sampled.Draws(c)
    assert sampled.odds_of_outputs(draws, c) > sampled.FALSE_FAILURE and 0 < draws.accepted < draws.drafted


def test_each_setting_matters() -> None:
    """Every processor changes the distribution, and an end of text occurs."""
    distributions = [sampled.exact(0, processor, end) for processor in sampled.PROCESSORS for end in sampled.ENDS]
    assert all(one != other for one, other in combinations(distributions, 2))
    assert all(sum(d.values()) == pytest.approx(1.0) for d in distributions)


def test_every_value_occurs_and_every_exclusion_excludes() -> None:
    """Without one of the exclusions, more combinations would be allowed."""
    assert [set(values) for values in zip(*sampled.COMBINATIONS, strict=True)] == [set(axis) for axis in sampled.AXES]
    only = {name: 0 for name in sampled.EXCLUDED}
    for row in product(*sampled.AXES):
        broken = [name for name, excludes in sampled.EXCLUDED.items() if excludes(sampled.Combination(*row))]
        if len(broken) == 1:
            only[broken[0]] += 1
    assert all(only.values())


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3, 2), (3, 3, 2, 2), (2, 2, 2, 3, 2)])
def test_any_two_values_meet_and_few_rows_are_needed(sizes: tuple[int, ...]) -> None:
    axes = [[f"{number}{value}" for value in range(size)] for number, size in enumerate(sizes)]
    rows = pairwise(*axes)
    for (one, values), (other, others) in combinations(enumerate(axes), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(values, others))
    two_largest = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert two_largest <= len(rows) <= two_largest + 3 and rows == pairwise(*axes)
