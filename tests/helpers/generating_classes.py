"""Every class of the installed transformers that generates text, as small models."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel, models

from helpers.families import perturbed, spread
from helpers.small_configs import BOS, PAD, small_config

LARGEST = 20_000_000  # parameters


def generating_classes(word: str = "") -> Iterator[type[PreTrainedModel]]:
    """The public classes of transformers with a `generate` of theirs or of `GenerationMixin`, by name of the family.

    Args:
        word: those of modules whose source holds it.
    """
    for family in pkgutil.iter_modules(models.__path__):
        for module in pkgutil.iter_modules([f"{models.__path__[0]}/{family.name}"]):
            source = Path(models.__path__[0], family.name, f"{module.name}.py")
            if module.name.startswith("modeling_") and word in source.read_text(encoding="utf-8"):
                yield from _classes_in(f"{models.__name__}.{family.name}.{module.name}")


def _classes_in(name: str) -> Iterator[type[PreTrainedModel]]:
    try:
        module = importlib.import_module(name)
    except ImportError:  # of a package that is not installed
        return
    for kind in [*vars(module).values()]:
        if not inspect.isclass(kind) or kind.__module__ != name or not issubclass(kind, PreTrainedModel):
            continue
        if kind.can_generate() and kind.__name__ in getattr(module, "__all__", ()):
            yield kind


def small_pair(kind: type[PreTrainedModel], dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A seeded model of a class, its weights spread so that its text varies, and a perturbed copy as its draft.

    Raises:
        Exception: the class can't be made small.
    """
    config = small_config(kind.config_class)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = kind(config).eval()
    if (head := model.get_output_embeddings()) is not None:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())  # a tied one answers each token with itself
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=spread(name))
            elif not weight.any() and ("gate" in name or "alpha" in name):
                weight.fill_(0.5)  # it would leave pictures out
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the others don't compute in float64
    model.generation_config.update(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=None, num_beams=1)
    return model.to(dtype), perturbed(model, 0.1).to(dtype)
