"""The training loop: Muon and AdamW, warm-up and linear decay, checkpoints from which an interrupted run resumes."""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.embedded.architectures import Shape, build
from hf_specdec.embedded.batches import batch_for_step


@dataclass(frozen=True)
class Recipe:
    """How one model is trained. The data of a step depends only on `seed` and the step.

    Attributes:
        decay: the last share of the steps, over which the learning rates fall to 0.
        emphasis: subtasks to draw more often; each mention adds two chances to the eleven of the usual mix.
        prompt_weight: the weight of a prompt token's loss, if an answer token's is 1. With a little of it a
            decoder-only model learns to copy sooner; later it is noise.
        few_shot: every fourth batch of an encoder-decoder model has solved examples in front of its questions.
        whole: rows of a decoder-only model hold whole examples only, so that no answer lacks its text.
        until: stop after this many steps, although the learning rates are scheduled for `steps`; None: don't.
        seedling: the recipe of a shallower model, which is trained first and then deepened into this one. That is
            much cheaper than training all layers from the start.
    """

    shape: Shape
    steps: int
    rows: int = 16  # of 256 tokens
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    warmup: int = 40
    seed: int = 0
    checkpoint_every: int = 50
    decay: float = 0.5
    until: int | None = None
    emphasis: tuple[str, ...] = ()
    prompt_weight: float = 0.1
    whole: bool = False
    few_shot: bool = False
    seedling: Recipe | None = None


# T5's position biases are far from where they start, and few: with AdamW's usual rate they take thousands of steps.
_BIAS_FACTOR = 10.0


class Optimizers:
    """Muon for the matrices of the layers, AdamW for embeddings, norms and position biases, under one schedule."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        biases: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters():
            in_layer = ".layers." in name or ".block." in name
            is_bias = "relative_attention_bias" in name
            (biases if is_bias else matrices if in_layer and parameter.ndim == 2 else others).append(parameter)
        self._recipe = recipe
        self._each: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=0.01), recipe.muon_lr)
        ]
        for parameters, rate in ((others, recipe.adam_lr), (biases, _BIAS_FACTOR * recipe.adam_lr)):
            if parameters:
                adam = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
                self._each.append((adam, rate))

    def step(self, step: int) -> None:
        """Apply and clear the gradients with the learning rates of `step`."""
        recipe = self._recipe
        warm = min(1.0, (step + 1) / recipe.warmup)
        falling = recipe.decay * recipe.steps
        decay = min(1.0, (recipe.steps - step) / falling) if falling else 1.0
        for optimizer, peak in self._each:
            for group in optimizer.param_groups:
                group["lr"] = peak * warm * decay
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer, _ in self._each]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for (optimizer, _), state in zip(self._each, states, strict=True):
            optimizer.load_state_dict(state)


def _loss(model: Any, batch: Any, device: torch.device) -> torch.Tensor:
    """Mean cross-entropy under the batch's weights, with the forward pass in bfloat16."""
    inputs = {key: value.to(device) for key, value in batch.inputs.items()}
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(**inputs, use_cache=False).logits
    labels, weights = batch.labels.to(device), batch.weights.to(device)
    losses = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


@torch.no_grad()
def grow(shallow: PreTrainedModel, deep: PreTrainedModel) -> None:
    """Copy the weights of `shallow` into `deep`, each layer several times, so that `deep` computes the same.

    The first copy of a layer is exact. In the others, the output projections of attention and feed-forward are zero,
    so that they add nothing at first. Muon trains them all the same: its step size does not depend on the weights.

    Raises:
        ValueError: the depth of `deep` must be a multiple of that of `shallow`.
    """
    source = shallow.state_dict()
    for name, weight in deep.state_dict().items():
        match = re.search(r"(.*?)\.(layers|block)\.(\d+)\.", name)
        if not match:
            weight.copy_(source[name])
            continue
        stack, kind, index = match[1], match[2], int(match[3])
        depths = [len(model.get_submodule(f"{stack}.{kind}")) for model in (shallow, deep)]
        times, rest = divmod(depths[1], depths[0])
        if rest:
            raise ValueError(
                f"a model of {depths[0]} layers can't grow to {depths[1]}; choose a multiple of {depths[0]}"
            )
        # T5 keeps the whole stack's position biases in layer 0, which is always a first copy.
        twin = name.replace(f"{stack}.{kind}.{index}.", f"{stack}.{kind}.{index // times}.", 1)
        weight.copy_(source[twin])
        if index % times and name.endswith(("o_proj.weight", "down_proj.weight", ".o.weight", ".wo.weight")):
            weight.zero_()


def _save_atomically(state: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)  # if the process dies while writing, the previous checkpoint stays intact


def train(
    name: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, work_dir: Path, *, stop_after: int | None = None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train a model to the end of its recipe; continues from its checkpoint in `work_dir` if there is one.

    Args:
        stop_after: stop after this many steps of this call, as an interruption would; None: train to the end.

    Returns:
        The model (float32, evaluation mode) and `{"steps", "tokens", "seconds", "loss"}`, where tokens and seconds
        include earlier calls and the seedling.

    Raises:
        ValueError: the checkpoint was written with another recipe.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(recipe.shape, recipe.seed).to(device).train()
    optimizers = Optimizers(model, recipe)
    record: dict[str, Any] = {"steps": 0, "tokens": 0, "seconds": 0.0, "loss": None}
    path = work_dir / f"{name}.pt"
    work_dir.mkdir(parents=True, exist_ok=True)
    if not path.exists() and recipe.seedling is not None:
        shallow, earlier = train(f"{name}-seedling", recipe.seedling, tokenizer, work_dir)
        grow(shallow, model)
        record |= {"tokens": earlier["tokens"], "seconds": earlier["seconds"]}
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        if state["recipe"] != asdict(recipe):
            raise ValueError(f"{path} was written with another recipe; delete it to train {name} again")
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        record = state["record"]
    end = recipe.until or recipe.steps
    last = end if stop_after is None else min(end, record["steps"] + stop_after)
    began = time.perf_counter()
    while record["steps"] < last:
        step = record["steps"]
        batch = batch_for_step(tokenizer, encoder_decoder=recipe.shape.encoder_layers > 0, rows=recipe.rows,
                               seed=recipe.seed, step=step, emphasis=recipe.emphasis,
                               prompt_weight=recipe.prompt_weight, whole=recipe.whole,
                               few_shot=recipe.few_shot)  # fmt: skip
        loss = _loss(model, batch, device)
        loss.backward()
        optimizers.step(step)
        now = time.perf_counter()
        record = {
            "steps": step + 1,
            "tokens": record["tokens"] + sum(v.numel() for k, v in batch.inputs.items() if k.endswith("ids")),
            "seconds": record["seconds"] + now - began,
            "loss": loss.item() if step == 0 else 0.95 * record["loss"] + 0.05 * loss.item(),
        }
        began = now
        if (step + 1) % 20 == 0:
            print(f"{name} step {step + 1}/{recipe.steps} loss {record['loss']:.4f} "
                  f"{record['tokens'] / record['seconds']:.0f} tokens/s", flush=True)  # fmt: skip
        if (step + 1) % recipe.checkpoint_every == 0 or step + 1 == last:
            _save_atomically({"model": model.state_dict(), "optimizers": optimizers.state_dict(),
                              "record": record, "recipe": asdict(recipe)}, path)  # fmt: skip
    return model.eval(), record
