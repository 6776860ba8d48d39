"""What a user can choose about speculation, checked before any work begins. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

STRATEGIES = ("speculative", "bild")
DRAFTERS = ("model", "lookup", "hybrid", "none")
VERIFICATIONS = ("token", "block")
DRAFT_ERRORS = ("raise", "continue")

DEFAULT_ASSISTANT_TOKENS = 4
T5_ASSISTANT_TOKENS = 7
LOOKUP_ASSISTANT_TOKENS = 10
# The longest draft of "auto".
MAX_ASSISTANT_TOKENS = 16
T5_MODEL_TYPES = frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers"})


@dataclass(frozen=True)
class SpeculationConfig:
    """One call's settings.

    Args:
        strategy: `"speculative"` is lossless (Leviathan et al. 2023, algorithm 1); `"bild"` trades quality for
            speed by two thresholds (Kim et al. 2023).
        num_assistant_tokens: lookahead γ, the most tokens drafted in a round, at least 1. `None` takes 4, or 7
            for targets of the T5 family; 10 where all drafts are copies.
            `"auto"` chooses each round's length, from 0 to 16, by the acceptance and the times so far, those of
            earlier calls of the same models included, so that sampled text may differ from run to run at one seed
            (its distribution does not); where rounds are compiled or captured, among 0, 1, 2, 4, 8 and 16; across
            tokenizers it takes 4.
        fallback_threshold: BiLD only, a probability in [0, 1]. A drafted token whose distribution's maximum is
            below it is not appended; the target takes over. 0 never falls back.
        rollback_threshold: BiLD only, nats, at least 0. A drafted token at a distance -ln p_target above it is
            cut. 0 makes BiLD lossless.
        drafter: `"model"` drafts with the assistant model; `"lookup"` copies what followed the last tokens when
            they stood in the text (or the encoder's input) before, and needs no model; `"hybrid"` looks up
            first and drafts by the model where nothing matches; `"none"` decodes plainly in the same loop, the
            baseline. Copies have no draft probabilities, so that rules which read those let them pass.
        verification: how sampling judges drafts, both lossless. `"token"` by token (Leviathan et al. 2023);
            `"block"` all together (Sun et al. 2024), which keeps as many tokens or more in expectation. In greedy
            decoding they are the same.
        entropy_threshold: a number in [0, 1], or None for no such stop: a draft ends behind a token for which
            1 - sqrt(0.2 H) is below it, H the entropy in nats of the distribution that it was drawn from.
        compile: compile the draft's steps and the verification by `torch.compile`, once for each pair, number of
            rows, bucket of lengths and set of processors with their numbers (a new temperature compiles anew);
            seconds to minutes the first time, and kept with the target. `num_assistant_tokens="auto"` compiles a
            lookahead when it first chooses it. Implies static caches. Output is the same where it can't be had, and
            is decoded as without it: models that can't be fed from static caches (encoder-decoder, ALiBi), drafters
            other than the model or none, processors that read the text (repetition penalty), recorded scores.

        on_draft_error: `"raise"` passes on what the draft raises. `"continue"` decodes the rest of the call without
            drafts, after one warning; rounds are then neither compiled nor captured.

    Raises:
        ValueError: a value out of range, named with the way out.
    """

    strategy: str = "speculative"
    num_assistant_tokens: int | Literal["auto"] | None = None
    fallback_threshold: float = 0.6
    rollback_threshold: float = 3.0
    drafter: str = "model"
    verification: str = "token"
    entropy_threshold: float | None = None
    compile: bool = False
    on_draft_error: str = "raise"

    def __post_init__(self) -> None:
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile={self.compile!r} is no choice: give True or False.")
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"generation_strategy={self.strategy!r} is unknown: choose one of {', '.join(map(repr, STRATEGIES))}, "
                "or None for transformers' own decoding."
            )
        for name, known in (
            ("drafter", DRAFTERS),
            ("verification", VERIFICATIONS),
            ("on_draft_error", DRAFT_ERRORS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, known))}.")
        tokens = self.num_assistant_tokens
        if tokens is not None and tokens != "auto" and not (_is_integer(tokens) and tokens >= 1):
            raise ValueError(
                f"num_assistant_tokens={tokens!r} is out of range: give a whole number of at least 1, or 'auto'."
            )
        if not (_is_number(self.fallback_threshold) and 0.0 <= self.fallback_threshold <= 1.0):
            raise ValueError(
                f"fallback_threshold={self.fallback_threshold!r} is out of range: it is compared with a probability, "
                "so give a number from 0 (never fall back) to 1 (fall back unless the draft is certain)."
            )
        if not (_is_number(self.rollback_threshold) and self.rollback_threshold >= 0.0):
            raise ValueError(
                f"rollback_threshold={self.rollback_threshold!r} is out of range: it is a distance in nats, so give "
                "a number of at least 0 (0 is lossless; float('inf') never rolls back)."
            )
        entropy = self.entropy_threshold
        if entropy is not None and not (_is_number(entropy) and 0.0 <= entropy <= 1.0):
            raise ValueError(
                f"entropy_threshold={entropy!r} is out of range: it is compared with a bound of a probability, so "
                "give a number from 0 to 1 (1 stops unless the draft is certain), or None for no such stop."
            )

    @property
    def longest_draft(self) -> int:
        """The most tokens that a round may draft; the settings are resolved."""
        assert self.num_assistant_tokens is not None, "resolve the config first"
        return MAX_ASSISTANT_TOKENS if self.num_assistant_tokens == "auto" else self.num_assistant_tokens

    @property
    def drafts_by_model(self) -> bool:
        """Whether a draft model is needed."""
        return self.drafter in ("model", "hybrid")

    def resolve(self, model_type: str) -> SpeculationConfig:
        """The same settings with the default lookahead of the drafter or of the target's family filled in."""
        if self.num_assistant_tokens is not None:
            return self
        if self.drafter == "lookup":
            return replace(self, num_assistant_tokens=LOOKUP_ASSISTANT_TOKENS)
        default = T5_ASSISTANT_TOKENS if model_type in T5_MODEL_TYPES else DEFAULT_ASSISTANT_TOKENS
        return replace(self, num_assistant_tokens=default)


FIELDS = tuple(field.name for field in fields(SpeculationConfig) if field.name != "strategy")


def check_fields(settings: dict[str, Any]) -> None:
    """Refuse names that are no field of `SpeculationConfig`.

    Raises:
        ValueError: names the unknown field and the known ones.
    """
    for name in settings:
        if name not in FIELDS:
            raise ValueError(f"{name}={settings[name]!r} is no speculation setting: choose among {', '.join(FIELDS)}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
