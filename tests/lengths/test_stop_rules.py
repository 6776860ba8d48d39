"""Where drafts end: by entropy, and where several rules apply."""

import torch
from helpers.families import pair, prompts

from hf_specdec import SpeculativeDecoding
from hf_specdec.lengths.auto_length import AutoLength
from hf_specdec.lengths.stop_rules import ConfidenceStop, EntropyStop, Fallback, FirstOf, StopRule
from hf_specdec.rules.round_statistics import Round


def test_the_first_of_several_rules_to_stop_stops() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    all_three = FirstOf(StopRule(3), Fallback(16, 0.6), EntropyStop(16, 1.0))
    assert all_three.limit == 3 and all_three.reads_probabilities
    before, after = all_three.before_append(probs), all_three.after_append(probs)
    assert before is not None and before.tolist() == [False, True]
    assert after is not None and after.tolist() == [True, True]
    assert FirstOf(StopRule(3), Fallback(16, 0.6)).after_append(probs) is None
    auto = AutoLength()
    shared = FirstOf(auto, Fallback(16, 0.6))
    for _ in range(5):
        n = shared.limit
        shared.observe(Round((n,), (n,), (n + 1,), (0.0,), n, n + 1, 0.0, 0.0, 0.0))
        assert shared.limit == auto.limit
    assert auto.limit > 0 and not FirstOf(StopRule(3), auto).reads_probabilities


def test_the_entropy_stop_goes_by_its_bound() -> None:
    """H = ln 2 gives 1 - sqrt(0.2 ln 2) = 0.6277; a certain token gives 1."""
    probs = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert [EntropyStop(4, t).after_append(probs).tolist() for t in (0.62, 0.63, 1.0)] == [
        [False, False],
        [True, False],
        [True, False],
    ]


def test_the_confidence_stop_goes_by_the_highest_probability() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]])
    assert [ConfidenceStop(4, t).after_append(probs).tolist() for t in (0.0, 0.5, 0.6, 1.0)] == [
        [False, False],
        [False, False],
        [True, False],
        [True, False],
    ]


def test_a_draft_that_is_never_sure_drafts_the_token_whose_pass_is_paid_for() -> None:
    target, draft = pair("llama")
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=4, entropy_threshold=1.0)
    target.generate(**prompts(2), max_new_tokens=12, do_sample=False, eos_token_id=None, custom_generate=decoding)
    assert {(r.draft_steps, max(r.drafted)) for r in decoding.stats.rounds[:-1]} == {(1, 1)}


def test_rules_say_themselves_whether_rounds_can_be_prepared() -> None:
    """A subclass may do anything in Python, so that it counts as one that can't until it says otherwise."""

    class Changed(EntropyStop):
        pass

    class Compilable(EntropyStop):
        serves_prepared_rounds = True

    own = [StopRule(4), AutoLength(), Fallback(4, 0.5), EntropyStop(4, 0.5), ConfidenceStop(4, 0.5)]
    assert all(rule.serves_prepared_rounds for rule in (*own, FirstOf(*own), Compilable(4, 0.5)))
    assert not Changed(4, 0.5).serves_prepared_rounds
    assert not FirstOf(StopRule(4), Changed(4, 0.5)).serves_prepared_rounds
