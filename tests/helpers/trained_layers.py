"""Train multi-token-prediction layers for the embedded target, and decode with them in both loops, in some minutes.

    PYTHONPATH=tests python -m helpers.trained_layers --steps 200

Prints a line of JSON: how often the layers' drafts are accepted, and the seconds of interleaved calls, the fastest of
several, of plain `generate()`, of transformers' loop with the layers (one row only) and of ours, compiled and not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, modeling_layers

import hf_specdec
from hf_specdec import embedded
from hf_specdec.embedded.batches import batch_for_step

LAYERS, NEW_TOKENS, CALLS = 2, 64, 5


def trained(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, steps: int, rows: int = 8) -> Any:
    """Layers that tell the target's most likely tokens after the next one; the target stays as it is."""
    target.config.num_mtp_layers = LAYERS
    target.requires_grad_(False)
    torch.manual_seed(0)
    mtp = modeling_layers.MtpModel(target, LAYERS).train()
    weights = [weight for weight in mtp.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        batch = batch_for_step(tokenizer, encoder_decoder=False, rows=rows, seed=1, step=step)
        loss = _loss(mtp, target, batch.inputs["input_ids"], batch.weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 19:
            print(f"step {step + 1} loss {loss.item():.3f}", flush=True)
    return mtp.eval()


def _loss(mtp: Any, target: PreTrainedModel, ids: Tensor, weights: Tensor) -> Tensor:
    with torch.no_grad():
        outputs = target(input_ids=ids, output_hidden_states=[-1])
    wanted, states, total = outputs.logits.argmax(-1), outputs.hidden_states[-1], torch.zeros(())
    places = torch.arange(ids.shape[1]).unsqueeze(0)
    for layer in range(LAYERS):
        after = layer + 1
        states = mtp.forward_layer(layer, states[:, :-1], places[:, after:], None, input_ids=ids[:, after:])
        losses = functional.cross_entropy(
            mtp.shared_head(states).flatten(0, 1), wanted[:, after:].flatten(), reduction="none"
        )
        weight = weights[:, after:].flatten()
        total = total + (losses * weight).sum() / weight.sum() / LAYERS
    return total


def measured(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, Any]:
    """Acceptance, and the fastest seconds of each way of decoding the same prompts."""
    examples = [embedded.examples(name, n=8)[number] for number in range(8) for name in embedded.SUBTASKS][:rows]
    texts = [embedded.render_prompt(example) for example in examples]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    call: dict[str, Any] = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    ours = {"use_mtp": True, "generation_strategy": "speculative"}
    ways: dict[str, Callable[[], Tensor]] = {"plain": lambda: target.generate(**call)}
    if rows == 1:
        ways["transformers"] = lambda: target.generate(**call, use_mtp=True)
    for length in (1, LAYERS, 4):
        for compile in (False, True):
            settings = {**ours, "num_assistant_tokens": length, "compile": compile}
            name = f"ours {length}, compiled" if compile else f"ours {length}"
            ways[name] = lambda settings=settings: target.generate(**call, **settings)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, Any] = {}
    with hf_specdec.enable(target):
        for _ in range(CALLS):
            for name, decode in ways.items():
                start = time.perf_counter()
                decode()
                seconds[name].append(time.perf_counter() - start)
                if name.startswith("ours") and (stats := hf_specdec.last_speculation(target)) is not None:
                    found[f"{name}: acceptance"] = stats.acceptance_rate
    return found | {name: min(times) for name, times in seconds.items()}


def main() -> None:
    """Train, decode and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    path = embedded.model_path("target")
    target, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    mtp = trained(target, tokenizer, parser.parse_args().steps)
    with patch.object(modeling_layers.MtpModel, "from_pretrained", lambda *_, **__: mtp):
        print(json.dumps({rows: measured(target, tokenizer, rows) for rows in (1, 4, 8)}))


if __name__ == "__main__":
    main()
