"""The table of strategies: each names its stop rules, its relaxation, and how its drafts are verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_specdec.config import SpeculationConfig
from hf_specdec.host.processors import BildRollback
from hf_specdec.lengths.auto_length import AutoLength, LengthHistory
from hf_specdec.lengths.stop_rules import EntropyStop, Fallback, FirstOf, StopRule


@dataclass(frozen=True)
class Strategy:
    """How a strategy drafts and verifies.

    Args:
        stops: builds the rules that can end a draft before its full length, from resolved settings.
        rollback: builds the relaxation of the target's scores, from the settings and whether decoding is greedy. None
            is lossless.
        drafts_are_points: verify drafts as point masses, even if they were sampled.
    """

    stops: Callable[[SpeculationConfig], tuple[StopRule, ...]]
    rollback: Callable[[SpeculationConfig, bool], BildRollback] | None
    drafts_are_points: bool


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
    return FirstOf(*rules) if len(rules) > 1 else length


STRATEGY_TABLE: dict[str, Strategy] = {
    "speculative": Strategy(
        stops=lambda config: (),
        rollback=None,
        drafts_are_points=False,
    ),
    "bild": Strategy(
        stops=lambda config: (Fallback(config.longest_draft, config.fallback_threshold),),
        rollback=lambda config, greedy: BildRollback(config.rollback_threshold, greedy=greedy),
        drafts_are_points=True,
    ),
}
