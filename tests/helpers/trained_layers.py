"""Train drafters for the embedded target that read its hidden states, and decode with them, in some minutes each.

    PYTHONPATH=tests python -m helpers.trained_layers eagle3 --steps 200

The kinds are `mtp` (multi-token-prediction layers), `eagle3` and `dflash`. Prints a line of JSON: how often drafts are
accepted, and the seconds of interleaved calls, the fastest of several, of plain `generate()`, of transformers' loop
with the same weights (one row only; it does not know EAGLE-3 drafts), and of our loop without drafts and
with them, compiled and not.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_layers,
)

import hf_specdec
from hf_specdec import Eagle3Draft, embedded
from hf_specdec.embedded.batches import batch_for_step
from hf_specdec.models.eagle_draft import Eagle3Config

NEW_TOKENS, CALLS = 64, 5
LAYERS = 2  # of multi-token prediction
DEPTH = 3  # tokens that an EAGLE-3 draft learns to make in a row
BLOCK, BLOCKS = 6, 24  # tokens of a DFlash draft's block, and blocks that it learns from in each row
READ = (2, 4, 6)  # the target's layers whose input the last two read
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


def trained(kind: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, steps: int, rows: int = 8) -> Any:
    """A drafter that tells the target's most likely tokens after the next one; the target stays as it is."""
    target.requires_grad_(False)
    torch.manual_seed(0)
    make, losses = KINDS[kind]
    drafter = make(target).train()
    weights = [weight for weight in drafter.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        batch = batch_for_step(tokenizer, encoder_decoder=False, rows=rows, seed=1, step=step)
        with torch.no_grad():
            outputs = target(input_ids=batch.inputs["input_ids"], output_hidden_states=True)
        loss = losses(drafter, target, batch.inputs["input_ids"], outputs, batch.weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 19:
            print(f"step {step + 1} loss {loss.item():.3f}", flush=True)
    return drafter.eval()


def _mean(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.flatten(0, -2), wanted.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def _mtp_layers(target: PreTrainedModel) -> Any:
    target.config.num_mtp_layers = LAYERS
    return modeling_layers.MtpModel(target, LAYERS)


def _mtp_loss(mtp: Any, target: PreTrainedModel, ids: Tensor, outputs: Any, weights: Tensor) -> Tensor:
    wanted, states, total = outputs.logits.argmax(-1), outputs.hidden_states[-1], torch.zeros(())
    places = torch.arange(ids.shape[1]).unsqueeze(0)
    for layer in range(LAYERS):
        after = layer + 1
        states = mtp.forward_layer(layer, states[:, :-1], places[:, after:], None, input_ids=ids[:, after:])
        total = total + _mean(mtp.shared_head(states), wanted[:, after:], weights[:, after:]) / LAYERS
    return total


def _eagle_draft(target: PreTrainedModel) -> Eagle3Draft:
    sizes = {name: getattr(target.config, name) for name in SIZES}
    layers = transformers.LlamaConfig(**sizes, num_hidden_layers=1, rms_norm_eps=1e-6)
    draft = Eagle3Draft(Eagle3Config(layers, eagle_aux_hidden_state_layer_ids=list(READ)))
    draft.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    draft.embed_tokens = target.get_input_embeddings()
    return draft


def _eagle_loss(draft: Eagle3Draft, target: PreTrainedModel, ids: Tensor, outputs: Any, weights: Tensor) -> Tensor:
    """Each place goes on from its own states, DEPTH times, and sees the target's at the places before."""
    wanted, total, length = outputs.logits.argmax(-1), torch.zeros(()), ids.shape[1] - DEPTH
    states = draft.fused(torch.cat([outputs.hidden_states[layer][:, :length] for layer in READ], dim=-1))
    places, cache = torch.arange(length), DynamicCache()
    shown = places[:, None] >= places
    for step in range(DEPTH):
        read = slice(1 + step, 1 + step + length)
        mask = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)[None, None]
        embeddings = target.get_input_embeddings()(ids[:, read])
        states = draft(embeddings, states, {"full_attention": mask}, (places + step)[None], cache)
        total = total + _mean(draft.logits(states), wanted[:, read], weights[:, read]) / DEPTH
        shown = torch.cat([shown, places[:, None] == places], dim=1)
    return total


def _block_draft(target: PreTrainedModel) -> Any:
    sizes = {name: getattr(target.config, name) for name in SIZES}
    own = {"block_size": BLOCK, "mask_token_id": 0, "target_layer_ids": [layer - 1 for layer in READ]}
    kinds = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "max_position_embeddings": 2048}
    return transformers.MuseGlimmerAssistantModel(
        transformers.MuseGlimmerAssistantConfig(**sizes, **own, **kinds, rms_norm_eps=1e-6)
    )


def _block_loss(draft: Any, target: PreTrainedModel, ids: Tensor, outputs: Any, weights: Tensor) -> Tensor:
    """Many blocks of a row in one pass: each sees the target's states before it, and itself."""
    rows, length = ids.shape
    anchors = torch.stack([torch.randperm(length - BLOCK - 1)[:BLOCKS] + 1 for _ in range(rows)])
    inside = anchors[:, :, None] + torch.arange(BLOCK)  # places `[B, blocks, BLOCK]`
    tokens = torch.full_like(inside, draft.config.mask_token_id)
    tokens[:, :, 0] = ids.gather(1, anchors)
    block = torch.arange(BLOCKS).repeat_interleave(BLOCK)
    before = torch.arange(length) < anchors.repeat_interleave(BLOCK, dim=1)[:, :, None]
    shown = torch.cat([before, (block[:, None] == block).expand(rows, -1, -1)], dim=2)
    made = draft(
        noise_embeds=target.get_input_embeddings()(tokens.flatten(1)),
        context_hidden_states=torch.cat([outputs.hidden_states[layer] for layer in READ], dim=-1),
        attention_mask={
            "full_attention": torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)[:, None]
        },
        position_ids=torch.cat([torch.arange(length).expand(rows, -1), inside.flatten(1)], dim=1),
    ).last_hidden_state.unflatten(1, (BLOCKS, BLOCK))[:, :, 1:]
    told = (inside[:, :, 1:] - 1).flatten(1)  # the place that the target tells each token from
    first = torch.exp(-torch.arange(BLOCK - 1) / 4.0).repeat(BLOCKS)  # what follows a wrong token is never kept
    wanted = outputs.logits.argmax(-1).gather(1, told)
    return _mean(target.get_output_embeddings()(made), wanted, weights.gather(1, told) * first)


# How each kind is made, and its loss.
KINDS: dict[str, tuple[Callable[[PreTrainedModel], Any], Callable[..., Tensor]]] = {
    "mtp": (_mtp_layers, _mtp_loss), "eagle3": (_eagle_draft, _eagle_loss), "dflash": (_block_draft, _block_loss),
}  # fmt: skip


def measured(
    kind: str, drafter: Any, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int
) -> dict[str, Any]:
    """Acceptance, and the fastest seconds of each way of decoding the same prompts."""
    examples = [embedded.examples(name, n=8)[number] for number in range(8) for name in embedded.SUBTASKS][:rows]
    texts = [embedded.render_prompt(example) for example in examples]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    call: dict[str, Any] = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    asked: dict[str, dict[str, Any]] = {
        "mtp": {"use_mtp": True},
        "eagle3": {"assistant_model": drafter},
        "dflash": {"assistant_model": drafter, "speculation_type": "dflash"},
    }
    ways: dict[str, dict[str, Any]] = {"plain": {}}
    if rows == 1 and kind != "eagle3":
        ways["transformers"] = asked[kind]
    for compile in (False, True):
        engine, words = {"generation_strategy": "speculative", "compile": compile}, ", compiled" if compile else ""
        ways[f"ours plain{words}"] = {**engine, "drafter": "none"}
        for length in (1, 2, 3, 4, 5):
            ways[f"ours {length}{words}"] = {**engine, **asked[kind], "num_assistant_tokens": length}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, Any] = {}
    with hf_specdec.enable(target):
        for _ in range(CALLS):
            for name, settings in ways.items():
                start = time.perf_counter()
                target.generate(**call, **settings)
                seconds[name].append(time.perf_counter() - start)
                if asked[kind].items() <= settings.items() and name != "transformers":
                    stats = hf_specdec.last_speculation(target)
                    found[f"{name}: acceptance"] = stats.acceptance_rate
    return found | {name: min(times) for name, times in seconds.items()}


def main() -> None:
    """Train, decode and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    path = embedded.model_path("target")
    target, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    drafter = trained(given.kind, target, tokenizer, given.steps)
    with patch.object(modeling_layers.MtpModel, "from_pretrained", lambda *_, **__: drafter):
        print(json.dumps({rows: measured(given.kind, drafter, target, tokenizer, rows) for rows in (1, 4, 8)}))


if __name__ == "__main__":
    main()
