"""What a strategy is: a row of a table that names its stop rules, its relaxation and its kind of drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_specdec.config import SpeculationConfig
from hf_specdec.host.processors import BildRollback
from hf_specdec.lengths.auto_length import AutoLength, LengthHistory
from hf_specdec.lengths.stop_rules import EntropyStop, Fallback, FirstOf, StopRule


@dataclass(frozen=True)
class Strategy:
    """How a strategy drafts and judges.

    Args:
        stops: makes the rules that end a round's drafting before its full length, from resolved settings.
        rollback: makes the relaxation from the settings and whether decoding is greedy; None is lossless.
        drafts_are_points: drafts count as point masses, even where they were drawn.
    """

    stops: Callable[[SpeculationConfig], tuple[StopRule, ...]]
    rollback: Callable[[SpeculationConfig, bool], BildRollback] | None
    drafts_are_points: bool


def stop_rule(config: SpeculationConfig, known: LengthHistory | None = None) -> StopRule:
    """The rule that ends a round's drafting: a length, and what else the strategy and the settings stop by.

    Args:
        config: resolved settings.
        known: what earlier calls have taught about the length that pays.
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
