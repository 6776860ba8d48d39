"""The arguments of a run of the script, and the exception whose message its user reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_specdec.config import LOSSY_STRATEGIES, STRATEGY_SETTINGS, WITH_MODEL, SpeculationConfig

# Settings of ours that are keywords of generate(), in the order in which they are written.
KEYWORDS = (
    "num_assistant_tokens", "fallback_threshold", "rollback_threshold", "lenience", "posterior_threshold",
    "assistant_ensemble_weight", "drafter", "verification", "entropy_threshold", "compile", "cache_implementation",
)  # fmt: skip
_OURS: dict[str, Any] = {one.name: one.default for one in fields(SpeculationConfig)}


class BenchError(Exception):
    """A problem that the user can solve; its one line names the argument, its value and the way out."""


@dataclass(frozen=True)
class Settings:
    """The arguments of one run, checked one by one before; None leaves the choice to us.

    Each task has defaults of its own. `grid` holds the values of arguments that got several, where the task takes
    several. Keywords of generate() have the names that they have there.
    """

    task: str = "benchmark"
    model_name: str = "target"
    assisted_generation: bool = False
    assistant_model: str | None = None
    gguf_file: str | None = None  # becomes the end of model_name
    draft_gguf_file: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    generation_strategy: str = "speculative"
    do_sample: bool = False
    temperature: float | None = None  # of these three the model's own
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
    split: str | None = None  # embedded: heldout; hub: test
    prompt_column: str | None = None
    answer_column: str | None = None
    reference_column: str | None = None
    prompt_template: str = "{prompt}"
    limit: int | None = None
    embedded_limit: int = 50  # without a limit, of each embedded subtask
    better_transformer: bool = False
    batch_sizes: tuple[int, ...] = (1,)
    engines: tuple[str, ...] = ("recorded", "compiled")
    minutes: float = 10.0
    max_quality_loss: float | None = None  # in points; without it only lossless methods
    precision: str | None = None
    draft_precision: str | None = None
    draft_vocabulary: int | None = None  # tokens of a trimmed head
    device_map: str | None = None
    offload_folder: Path | None = None
    allow_pickle: bool = False
    held_out: float | None = None  # a tenth
    loss: str = "forward_kl"
    steps: int | None = None  # by the number of answers
    learning_rate: float | None = None  # by the draft's size
    top_k_targets: int | None = None
    lora_rank: int | None = None
    on_policy: float = 0.0
    own_prompts: bool = False
    layers: tuple[int, ...] = ()  # by what they change, and by what is fastest
    check: bool = False
    pass_times: Mapping[str, Any] = field(default_factory=dict)  # milliseconds
    output_dir: Path = Path("runs")

    @property
    def sampling(self) -> bool:
        """Whether tokens are drawn; temperature 0 always means greedy decoding."""
        return self.do_sample and self.temperature != 0

    @property
    def batch_size(self) -> int:
        """The rows that are decoded at once, for tasks with one batch size."""
        return self.batch_sizes[0]

    @property
    def endless(self) -> bool:
        """Whether EOS is ignored, so that all methods decode exactly `max_new_tokens` tokens."""
        return self.task == "engines"

    @property
    def uses_draft(self) -> bool:
        """Whether a draft model is needed: it is named, or some method drafts with one."""
        named = bool(self.assistant_model or self.draft_models)
        # Answers are replayed with the draft model that is named, if any; a draft is yet to be made.
        by_model = self.task not in ("replay", "draft") and any(
            one in (None, *WITH_MODEL) for one in self.values("drafter")
        )
        return self.assisted_generation and (named or by_model)

    @property
    def own_lengths(self) -> bool:
        """Whether a task on prompts of exact lengths was given prompts, which have lengths of their own."""
        return bool(self.prompts) or self.dataset != "embedded"

    @property
    def lossy_strategies(self) -> tuple[str, ...]:
        """The lossy strategies that are part of a sweep: given by name or by their own settings."""
        given = (self.generation_strategy, *self.grid) if self.task == "sweep" else ()
        return tuple(name for name in LOSSY_STRATEGIES if {name, *STRATEGY_SETTINGS[name]} & set(given))

    def values(self, name: str) -> tuple[Any, ...]:
        """All values of an argument: those of the grid, or the one that it has."""
        return self.grid.get(name) or (getattr(self, name),)

    def generate_kwargs(self) -> dict[str, Any]:
        """The part of generate()'s arguments that is the same for every method."""
        if not self.sampling:
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return {"do_sample": True, **self.given_sampling()}

    def given_sampling(self) -> dict[str, float]:
        """Of temperature, top-k and top-p those that were given; of the others the model has its own."""
        values = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        return {name: value for name, value in values.items() if value is not None}
