"""What a run of the script was asked to do, and the one exception that its user is meant to read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class BenchError(Exception):
    """A problem that the user can solve; its one line names the argument, its value and the way out."""


@dataclass(frozen=True)
class Settings:
    """The arguments of one run, checked one by one before; None leaves the choice to us."""

    task: str = "benchmark"
    model_name: str = "target"
    assisted_generation: bool = False
    assistant_model: str | None = None
    generation_strategy: str = "speculative"
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50  # transformers' own default
    top_p: float = 1.0
    seed: int = 0
    num_assistant_tokens: int | None = None
    fallback_threshold: float = 0.6
    rollback_threshold: float = 3.0
    max_new_tokens: int = 30
    prompt_lengths: tuple[int, ...] = (256, 512)
    prompts: tuple[str, ...] = ()
    device: str | None = None
    draft_device: str | None = None
    dtype: str = "auto"
    draft_dtype: str = "auto"
    repeats: int = 1
    # Several values at once are for the task `sweep`.
    draft_models: tuple[str, ...] = ()
    lookaheads: tuple[int, ...] = ()
    fallback_thresholds: tuple[float, ...] = ()
    rollback_thresholds: tuple[float, ...] = ()
    dataset: str = "embedded"
    dataset_path: Path | None = None
    split: str | None = None  # embedded: heldout; hub: test
    prompt_column: str | None = None
    reference_column: str | None = None
    prompt_template: str = "{prompt}"
    limit: int | None = None
    better_transformer: bool = False
    # The tasks `engines` and `growth`.
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    engines: tuple[str, ...] = ("eager", "compiled")
    calls: int = 2000  # of the task `growth`
    precision: str | None = None
    draft_precision: str | None = None
    device_map: str | None = None
    offload_folder: Path | None = None
    output_dir: Path = Path("results")

    @property
    def sampling(self) -> bool:
        """Whether tokens are drawn: temperature 0 is greedy decoding, whatever else was asked for."""
        return self.do_sample and self.temperature > 0

    def generate_kwargs(self) -> dict[str, Any]:
        """The part of generate()'s arguments that is the same for every method."""
        if not self.sampling:
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}
