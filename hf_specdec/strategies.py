"""What a strategy is: a row of a table that names its stop rule, its relaxation and its kind of drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_specdec.config import SpeculationConfig
from hf_specdec.draft_length import Fallback, StopRule
from hf_specdec.processors import BildRollback


@dataclass(frozen=True)
class Strategy:
    """How a strategy drafts and judges.

    Args:
        stop_rule: makes the rule that ends a round's drafting from resolved settings.
        rollback: makes the relaxation from the settings and whether decoding is greedy; None is lossless.
        drafts_are_points: drafts count as point masses, even where they were drawn.
    """

    stop_rule: Callable[[SpeculationConfig], StopRule]
    rollback: Callable[[SpeculationConfig, bool], BildRollback] | None
    drafts_are_points: bool


def _lookahead(config: SpeculationConfig) -> int:
    assert config.num_assistant_tokens is not None, "resolve the config first"
    return config.num_assistant_tokens


TABLE: dict[str, Strategy] = {
    "speculative": Strategy(
        stop_rule=lambda config: StopRule(_lookahead(config)),
        rollback=None,
        drafts_are_points=False,
    ),
    "bild": Strategy(
        stop_rule=lambda config: Fallback(_lookahead(config), config.fallback_threshold),
        rollback=lambda config, greedy: BildRollback(config.rollback_threshold, greedy=greedy),
        drafts_are_points=True,
    ),
}
