"""The settings of speculation and their validation. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal

# The settings that belong to each strategy alone.
STRATEGY_SETTINGS: dict[str, tuple[str, ...]] = {
    "speculative": (),
    "bild": ("fallback_threshold", "rollback_threshold"),
    "lenient": ("lenience",),
    "typical": ("posterior_threshold",),
    "ensemble": ("assistant_ensemble_weight",),
}
STRATEGIES = tuple(STRATEGY_SETTINGS)
LOSSY_STRATEGIES = tuple(name for name, own in STRATEGY_SETTINGS.items() if own)
DRAFTERS = ("auto", "model", "suffix", "lookup", "hybrid", "mtp", "dflash", "none")
# Drafters that copy, with or without a model besides.
COPYING = ("auto", "suffix", "lookup", "hybrid")
# Drafters that come with some models.
OWN_DRAFTERS = ("mtp", "dflash")
# Drafters that need an assistant model.
WITH_MODEL = ("model", "hybrid", "dflash")
VERIFICATIONS = ("token", "block")
DRAFT_ERRORS = ("raise", "continue")

DEFAULT_ASSISTANT_TOKENS = 4
T5_ASSISTANT_TOKENS = 7
# The longest draft that "auto" chooses.
MAX_ASSISTANT_TOKENS = 16
# Most new tokens for which a call reserves memory in advance; larger maximum lengths are rarely reached.
FORESEEN_TOKENS = 4096
T5_MODEL_TYPES = frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers"})


@dataclass(frozen=True)
class Setting:
    """The values that a setting accepts, and its help.

    Args:
        help: one line.
        choices: the valid words.
        least, most: the range of valid numbers, inclusive.
        advice: for messages: the reason for the range, and what to pass.
    """

    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    advice: str = ""


def _setting(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(help, **more)})


@dataclass(frozen=True)
class SpeculationConfig:
    """One call's settings.

    Args:
        strategy: `"speculative"` is lossless (Leviathan et al. 2023, algorithm 1). The others trade quality for speed:
            `"bild"` (Kim et al. 2023), `"lenient"` (Leviathan et al. 2023, appendix A.5), `"typical"` (Cai et al. 2024,
            Medusa) and `"ensemble"` (transformers' `assistant_ensemble_weight`).
        num_assistant_tokens: lookahead γ, the most tokens drafted in a round, at least 1. `None` uses the value of the
            draft's own `generation_config`, else 4, 7 for T5 targets, and `"auto"` for `drafter="suffix"` and `"auto"`.
            `num_assistant_tokens="auto"` chooses the length of each round, from 0 to 16, based on the acceptance and
            the times measured so far, including earlier calls of the same models. Sampled text can therefore differ
            between runs with the same seed; its distribution does not. Where rounds are compiled or captured, it
            chooses among 0, 1, 2, 4, 8 and 16. With different tokenizers, the draft's tokens are counted.
        fallback_threshold: BiLD only, a probability in [0, 1]. If the draft's highest probability for the next token
            is below it, the token is not drafted and the target takes over. 0 never falls back.
        rollback_threshold: BiLD only, nats, at least 0. A drafted token is rolled back if its distance -ln p_target
            is greater. 0 makes BiLD lossless.
        lenience: lenient only, l in [0, 1]. In sampling a drafted token is kept with probability min(1, p / (l q)); in
            greedy decoding if p > l · max p. 1 is lossless; 0 keeps all that the target does not rule out.
        posterior_threshold: typical only, ε, at least 0. A drafted token is kept if p > min(ε, √ε exp(-H)), with the
            entropy H of the target's distribution in nats. `float("inf")` is lossless; 0 keeps all that the target
            does not rule out.
        assistant_ensemble_weight: ensemble only, w in [0, 1]. Drafts are verified against w · target + (1 - w) · draft.
            1 is lossless; 0 accepts every draft. Requires `drafter="model"`, since copies have no probabilities.
        drafter: `"model"` drafts with the assistant model. `"suffix"` needs no model: it finds the longest suffix of
            the text that occurred before, in the text, the other rows or the encoder's input, and copies its most
            frequent continuation, as far as that is likely enough to be worth a wider pass; `"lookup"` is another name
            for it. `"hybrid"` chooses between such a copy and the model, round by round and row by row. `"auto"` is
            `"hybrid"` with an assistant model and `"suffix"` without, and sets `num_assistant_tokens="auto"` by
            default: each round drafts whatever is expected to yield the most tokens per second, or nothing. `"mtp"`
            drafts with the target's own multi-token-prediction layers (`use_mtp=True`), `"dflash"` with an assistant
            model that drafts a block in one pass (`speculation_type="dflash"`). `"none"` decodes without drafts in
            the same loop, as a baseline. Copies have no draft probabilities, so `fallback_threshold`,
            `entropy_threshold` and `assistant_confidence_threshold` don't apply to them.
        verification: how sampling verifies drafts; both are lossless. `"token"` decides token by token (Leviathan et
            al. 2023). `"block"` decides on the draft as a whole (Sun et al. 2024) and accepts at least as many tokens
            in expectation. Greedy decoding is the same with both.
        entropy_threshold: a number in [0, 1], or None to disable it. Drafting stops after a token if 1 - sqrt(0.2 H)
            is below the threshold, where H is the entropy, in nats, of the distribution that the token was drawn from.
        assistant_confidence_threshold: a probability in [0, 1], or None to disable it. Drafting stops after a token if
            the draft's highest probability at its place is below the threshold (transformers' dynamic length).
        compile: compile the draft's steps and the verification. Compiling takes 15 to 50 seconds, and the result is
            kept for later calls (see `release`). It is done once per pair of models, batch size, bucket of lengths,
            and processors with their settings (a new temperature compiles again); with `num_assistant_tokens="auto"`,
            also once per lookahead, when it is first chosen. Implies static caches.
            Some calls are decoded without compiled rounds, with the same output: models that don't support static
            caches (encoder-decoder models other than Whisper, ALiBi), drafters that models bring along, processors that
            read the text (repetition penalty) or are the caller's own, and recorded scores. On a CPU, they use the
            kernels of compiled rounds.
        on_draft_error: `"raise"` raises the draft's errors. `"continue"` warns once and decodes the rest of the call
            without drafts; only the models' passes are then compiled or captured, not whole rounds.
        disable_tqdm: show no progress bar while `compile=True` compiles. `transformers.utils.logging.
            disable_progress_bar()` does the same for all calls.
        suffix_memory: a `SuffixMemory` of earlier answers, from which `"suffix"` and `"hybrid"` copy as well, and to
            which the call's answers are added. None, the default, remembers nothing.

    Raises:
        ValueError: a value is out of range; the message names it and the valid ones.
    """

    strategy: str = _setting("speculative", "how drafts are used", choices=STRATEGIES)
    num_assistant_tokens: int | Literal["auto"] | None = _setting(
        None, "most tokens drafted per round, or auto", least=1
    )
    fallback_threshold: float = _setting(
        0.6, "BiLD: a draft ends before a token if the draft's best one has a probability below it", least=0, most=1,
        advice="it is compared with a probability, so pass a number from 0 (never fall back) to 1 (fall back unless "
        "the draft is certain)",
    )  # fmt: skip
    rollback_threshold: float = _setting(
        3.0, "BiLD: a drafted token is rejected if the target's -ln p exceeds it, in nats", least=0,
        advice="it is a distance in nats, so pass a number of at least 0 (0 is lossless; float('inf') never rolls "
        "back)",
    )  # fmt: skip
    lenience: float = _setting(
        0.5, "lenient: keep if p > L max p; in sampling with probability min(1, p / (L q))", least=0, most=1,
        advice="the draft's probability is multiplied by it, so pass a number from 0 (accept what the target does not "
        "rule out) to 1 (lossless)",
    )  # fmt: skip
    posterior_threshold: float = _setting(
        0.09, "typical: keep if p > min(E, sqrt(E) exp(-H))", least=0,
        advice="it bounds a probability, so pass a number of at least 0 (0 accepts all that the target does not rule "
        "out; float('inf') is lossless)",
    )  # fmt: skip
    assistant_ensemble_weight: float = _setting(
        0.5, "ensemble: drafts are judged by W target + (1 - W) draft", least=0, most=1,
        advice="it is the target's share in a mixture, so pass a number from 0 (accept every draft) to 1 (lossless)",
    )  # fmt: skip
    drafter: str = _setting("model", "who drafts", choices=DRAFTERS)
    verification: str = _setting("token", "how sampling judges drafted tokens", choices=VERIFICATIONS)
    entropy_threshold: float | None = _setting(
        None, "a draft ends after a token with 1 - sqrt(0.2 entropy) below it", least=0, most=1,
        advice="it is compared with a lower bound on a probability, so pass a number from 0 to 1 (1 stops unless the "
        "draft is certain), or None to disable",
    )  # fmt: skip
    assistant_confidence_threshold: float | None = _setting(
        None, "a draft ends after a token if the draft's best one has a probability below it", least=0, most=1,
        advice="it is compared with a probability, so pass a number from 0 to 1 (1 stops unless the draft is "
        "certain), or None to disable",
    )  # fmt: skip
    compile: bool = _setting(False, "compile the rounds")
    on_draft_error: str = _setting("raise", "what to do after an error of the draft", choices=DRAFT_ERRORS)
    disable_tqdm: bool = _setting(False, "show no progress bar while compiling")
    suffix_memory: Any = field(
        default=None, metadata={"setting": Setting("earlier answers to copy from, a SuffixMemory")}
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            _check(one.name, value, SETTINGS[one.name], optional=one.default is None)
            if isinstance(value, Real) and not isinstance(value, bool):
                # numpy's numbers are not constants to a compiler
                object.__setattr__(self, one.name, int(value) if isinstance(value, Integral) else float(value))
        if self.strategy == "ensemble" and self.drafter in COPYING:
            raise ValueError(
                f"drafter={self.drafter!r} with generation_strategy='ensemble': copies have no probabilities to mix "
                "with the target's, so choose drafter='model', or another strategy."
            )
        if self.drafter == "lookup":
            object.__setattr__(self, "drafter", "suffix")

    @property
    def longest_draft(self) -> int:
        """The most tokens that a round may draft. Requires resolved settings."""
        assert self.num_assistant_tokens is not None, "resolve the config first"
        return MAX_ASSISTANT_TOKENS if self.num_assistant_tokens == "auto" else self.num_assistant_tokens

    @property
    def drafts_by_model(self) -> bool:
        """Whether drafting needs a model."""
        return self.drafter in ("model", "hybrid")

    def choosing(self, *, has_model: bool) -> SpeculationConfig:
        """Replace `drafter="auto"` by the drafter that it stands for."""
        if self.drafter != "auto":
            return self
        drafter = "hybrid" if has_model else "suffix"
        return replace(self, drafter=drafter, num_assistant_tokens=self.num_assistant_tokens or "auto")

    def within(self, room: int) -> SpeculationConfig:
        """Limit the lookahead for a call whose rows have room for `room` tokens. Requires resolved settings.

        A longer lookahead, which would waste memory, becomes the next power of two above the room, so that calls with
        little room share compiled rounds. It never exceeds `FORESEEN_TOKENS`.
        """
        most = min(max(1 << (room - 1).bit_length(), MAX_ASSISTANT_TOKENS), FORESEEN_TOKENS)
        return replace(self, num_assistant_tokens=most) if self.longest_draft > most else self

    def drafting_at_most(self, tokens: float) -> SpeculationConfig:
        """Limit the lookahead to `tokens`; an "auto" that could exceed it becomes fixed. Requires resolved settings."""
        if self.longest_draft <= tokens:
            return self
        wanted = DEFAULT_ASSISTANT_TOKENS if self.num_assistant_tokens == "auto" else self.longest_draft
        return replace(self, num_assistant_tokens=int(min(tokens, wanted)))

    def resolve(self, model_type: str) -> SpeculationConfig:
        """Fill in the default lookahead of the drafter or of the target's model family."""
        if self.num_assistant_tokens is not None:
            return self
        if self.drafter in ("auto", "suffix"):
            return replace(self, num_assistant_tokens="auto")
        default = T5_ASSISTANT_TOKENS if model_type in T5_MODEL_TYPES else DEFAULT_ASSISTANT_TOKENS
        return replace(self, num_assistant_tokens=default)


SETTINGS: dict[str, Setting] = {one.name: one.metadata["setting"] for one in fields(SpeculationConfig)}
FIELDS = tuple(name for name in SETTINGS if name != "strategy")


def check_fields(settings: dict[str, Any]) -> None:
    """Refuse names that are not fields of `SpeculationConfig`.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    for name in settings:
        if name == "generation_strategy":
            raise ValueError(
                f"generation_strategy={settings[name]!r}: the argument is called strategy here, as in "
                f"SpeculativeDecoding(draft, strategy={settings[name]!r})."
            )
        if name not in FIELDS:
            raise ValueError(
                f"{name}={settings[name]!r} is not a speculation setting: choose among {', '.join(FIELDS)}."
            )


def _check(name: str, value: Any, setting: Setting, *, optional: bool) -> None:
    if optional and value is None:
        return
    if name == "num_assistant_tokens":
        if not ((isinstance(value, str) and value == "auto") or (_is_integer(value) and int(value) >= 1)):
            raise ValueError(
                f"num_assistant_tokens={value!r} is not a length: pass an integer of at least 1, or 'auto'."
            )
    elif name == "suffix_memory":
        if not hasattr(value, "automata"):
            raise ValueError(f"suffix_memory={value!r} must be a hf_specdec.SuffixMemory(), or None.")
    elif setting.choices:
        if not (isinstance(value, str) and value in setting.choices):
            shown, none = (
                ("generation_strategy", ", or None for transformers' own decoding")
                if name == "strategy"
                else (name, "")
            )
            known = ", ".join(map(repr, setting.choices))
            raise ValueError(f"{shown}={value!r} is unknown: choose one of {known}{none}.")
    elif setting.least is None:
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is not a boolean: pass True or False.")
    elif not (_is_number(value) and setting.least <= value and (setting.most is None or value <= setting.most)):
        raise ValueError(f"{name}={value!r} is out of range: {setting.advice}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and value == value
