"""The arguments of a run of the script, and the exception for problems that its user can solve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_specdec.config import LOSSY_STRATEGIES, STRATEGY_SETTINGS, WITH_MODEL, SpeculationConfig

# This package's keywords of generate(), in the order in which reports show them.
KEYWORDS = (
    "num_assistant_tokens", "fallback_threshold", "rollback_threshold", "lenience", "posterior_threshold",
    "assistant_ensemble_weight", "drafter", "verification", "entropy_threshold", "compile", "cache_implementation",
)  # fmt: skip
_OURS: dict[str, Any] = {one.name: one.default for one in fields(SpeculationConfig)}


class BenchError(Exception):
    """A problem that the user can solve; the one-line message names the argument, its value and the way out."""


@dataclass(frozen=True)
class Settings:
    """The arguments of one run, already checked one by one; None means the default.

    Each task has its own defaults. `grid` holds the values of arguments that were given several. Keywords of
    generate() have the same names here.
    """

    task: str = "benchmark"
    model_name: str = "target"
    assisted_generation: bool = False
    assistant_model: str | None = None
    gguf_file: str | None = None  # appended to model_name
    draft_gguf_file: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    generation_strategy: str = "speculative"
    do_sample: bool = False
    temperature: float | None = None  # default of these three: the model's own
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    num_assistant_tokens: int | str | None = None  # or "auto"
    fallback_threshold: float = _OURS["fallback_threshold"]
    rollback_threshold: float = _OURS["rollback_threshold"]
    lenience: float = _OURS["lenience"]
    posterior_threshold: float = _OURS["posterior_threshold"]
    assistant_ensemble_weight: float = _OURS["assistant_ensemble_weight"]
    drafter: str | None = None
    verification: str | None = None
    entropy_threshold: float | None = None
    compile: bool = False
    cache_implementation: str | None = None
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    max_new_tokens: int = 30
    prompt_lengths: tuple[int, ...] = (256, 512)
    prompts: tuple[str, ...] = ()
    device: str | None = None
    draft_device: str | None = None
    dtype: str = "auto"
    draft_dtype: str = "auto"
    repeats: int = 1
    draft_models: tuple[str, ...] = ()
    dataset: str = "embedded"
    dataset_path: Path | None = None
    split: str | None = None  # default: heldout for embedded, test for the hub
    prompt_column: str | None = None
    answer_column: str | None = None
    reference_column: str | None = None
    prompt_template: str = "{prompt}"
    limit: int | None = None
    embedded_limit: int = 50  # limit for each embedded subtask, if `limit` is None
    better_transformer: bool = False
    batch_sizes: tuple[int, ...] = (1,)
    engines: tuple[str, ...] = ("recorded", "compiled")
    minutes: float = 10.0
    max_quality_loss: float | None = None  # in points; default: lossless methods only
    precision: str | None = None
    draft_precision: str | None = None
    draft_vocabulary: int | None = None  # tokens of a trimmed head
    device_map: str | None = None
    offload_folder: Path | None = None
    allow_pickle: bool = False
    held_out: float | None = None  # a tenth
    loss: str = "forward_kl"
    steps: int | None = None  # default: by the number of answers
    learning_rate: float | None = None  # default: by the draft's size
    top_k_targets: int | None = None
    lora_rank: int | None = None
    on_policy: float = 0.0
    own_prompts: bool = False
    layers: tuple[int, ...] = ()  # default: by their effect on the output, and by speed
    check: bool = False
    pass_times: Mapping[str, Any] = field(default_factory=dict)  # milliseconds
    output_dir: Path = Path("runs")

    @property
    def sampling(self) -> bool:
        """Whether tokens are drawn; temperature 0 always means greedy decoding."""
        return self.do_sample and self.temperature != 0

    @property
    def batch_size(self) -> int:
        """The number of rows decoded at once, for tasks with one batch size."""
        return self.batch_sizes[0]

    @property
    def endless(self) -> bool:
        """Whether EOS is ignored, so that all methods decode exactly `max_new_tokens` tokens."""
        return self.task == "engines"

    @property
    def uses_draft(self) -> bool:
        """Whether a draft model is needed: one is named, or some method drafts with one."""
        named = bool(self.assistant_model or self.draft_models)
        # Replaying needs no draft model unless one is named; the task draft makes its own.
        by_model = self.task not in ("replay", "draft") and any(
            one in (None, *WITH_MODEL) for one in self.values("drafter")
        )
        return self.assisted_generation and (named or by_model)

    @property
    def own_lengths(self) -> bool:
        """Whether a task on prompts of exact lengths was given prompts, each with its own length."""
        return bool(self.prompts) or self.dataset != "embedded"

    @property
    def lossy_strategies(self) -> tuple[str, ...]:
        """The lossy strategies in a sweep: those given by name or by one of their settings."""
        given = (self.generation_strategy, *self.grid) if self.task == "sweep" else ()
        return tuple(name for name in LOSSY_STRATEGIES if {name, *STRATEGY_SETTINGS[name]} & set(given))

    def values(self, name: str) -> tuple[Any, ...]:
        """All values of an argument: those of the grid, or its single one."""
        return self.grid.get(name) or (getattr(self, name),)

    def generate_kwargs(self) -> dict[str, Any]:
        """The arguments of generate() that all methods share."""
        if not self.sampling:
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return {"do_sample": True, **self.given_sampling()}

    def given_sampling(self) -> dict[str, float]:
        """Those of temperature, top-k and top-p that were given; the model's own apply otherwise."""
        values = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        return {name: value for name, value in values.items() if value is not None}
