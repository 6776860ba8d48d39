"""The table of strategies: each names its stop rules, its relaxation, and how its drafts are verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hf_specdec.config import SpeculationConfig
from hf_specdec.host.relaxations import BildRollback, Ensemble, LenientArgmax, Relaxation, TypicalAcceptance
from hf_specdec.lengths.auto_length import AutoLength
from hf_specdec.lengths.history import LengthHistory
from hf_specdec.lengths.stop_rules import ConfidenceStop, EntropyStop, Fallback, FirstOf, StopRule
from hf_specdec.rules.verification import Lenient, Rule


@dataclass(frozen=True)
class Strategy:
    """How a strategy drafts and verifies.

    Args:
        stops: builds the rules that can end a draft before its full length, from resolved settings.
        relaxation: builds the relaxation of the target's scores, from the settings and whether decoding is greedy.
        sampling_rule: builds the rule for sampling, from the settings and the lossless rule that they choose.
        draft_probs: when the draft's distributions are verified with: never (drafts are point masses, even if they
            were sampled), in sampling, or always.
    """

    stops: Callable[[SpeculationConfig], tuple[StopRule, ...]] = lambda config: ()
    relaxation: Callable[[SpeculationConfig, bool], Relaxation | None] = lambda config, greedy: None
    sampling_rule: Callable[[SpeculationConfig, Rule], Rule] = lambda config, rule: rule
    draft_probs: Literal["never", "sampling", "always"] = "sampling"

    def keeps_draft_probs(self, do_sample: bool) -> bool:
        """Whether a call's drafts are verified with their distributions."""
        return self.draft_probs == "always" or (do_sample and self.draft_probs == "sampling")


def stop_rule(config: SpeculationConfig, known: LengthHistory | None = None) -> StopRule:
    """The rule that ends a round's drafting: the length limit, combined with the strategy's and settings' own rules.

    Args:
        config: resolved settings.
        known: measurements from earlier calls, used by `num_assistant_tokens="auto"`.
    """
    auto = config.num_assistant_tokens == "auto"
    length = AutoLength(known) if auto else StopRule(config.longest_draft)
    rules = [length, *STRATEGY_TABLE[config.strategy].stops(config)]
    if config.entropy_threshold is not None:
        rules.append(EntropyStop(config.longest_draft, config.entropy_threshold))
    if config.assistant_confidence_threshold is not None:
        rules.append(ConfidenceStop(config.longest_draft, config.assistant_confidence_threshold))
    return FirstOf(*rules) if len(rules) > 1 else length


STRATEGY_TABLE: dict[str, Strategy] = {
    "speculative": Strategy(),
    "bild": Strategy(
        stops=lambda config: (Fallback(config.longest_draft, config.fallback_threshold),),
        relaxation=lambda config, greedy: BildRollback(config.rollback_threshold, greedy=greedy),
        draft_probs="never",
    ),
    "lenient": Strategy(
        relaxation=lambda config, greedy: LenientArgmax(config.lenience) if greedy else None,
        sampling_rule=lambda config, rule: Lenient(rule, config.lenience),
    ),
    "typical": Strategy(
        relaxation=lambda config, greedy: TypicalAcceptance(config.posterior_threshold),
        draft_probs="never",
    ),
    "ensemble": Strategy(
        relaxation=lambda config, greedy: Ensemble(config.assistant_ensemble_weight),
        draft_probs="always",
    ),
}
