"""Times three ways to take back rejected drafts in a hybrid model; writes results/sizes-cpu/recurrent-rollback.json.

The model has random weights in the shape of Qwen3.5-0.8B, with 32,000 tokens instead of 248,320. The ways:

* steps: the recurrence runs token by token over the drafts, and one of the states is picked (what the package does);
* replay: it runs at once, and again from the old state over the accepted tokens;
* checkpoint: it runs at once, and the next pass reads the accepted tokens again together with its own drafts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from hf_specdec.models.recurrent_runner import RecurrentRunner

DRAFTS, REJECTED, PROMPT, REPEATS = 4, 2, 128, 7
ACCEPTANCE = 0.8
RESULT = Path(__file__).resolve().parents[1] / "results" / "sizes-cpu" / "recurrent-rollback.json"
CONFIG = Qwen3_5TextConfig(
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
)


def seconds(run: Callable[[], object]) -> float:
    """How long one run lasts."""
    began = perf_counter()
    run()
    return perf_counter() - began


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(CONFIG).eval()
    ids = torch.randint(CONFIG.vocab_size, (1, PROMPT))
    runner = RecurrentRunner(model, {"past_key_values": DynamicCache(config=CONFIG), "use_cache": True}, ids, 1024)
    runner.forward(ids, 1)
    plain = DynamicCache(config=CONFIG)
    model(ids, past_key_values=plain, use_cache=True)
    state = plain.layers[0].recurrent_states[0]
    layers = CONFIG.layer_types.count("linear_attention")
    q, k, v = (torch.randn(1, DRAFTS - REJECTED + 1, *state.shape[1:3]) for _ in range(3))
    g = -torch.rand(q.shape[:3])

    def at_once(width: int) -> Callable[[], object]:
        return lambda: model(ids[:, :width], past_key_values=plain, use_cache=True)

    def replay() -> None:
        for _ in range(layers):
            torch_chunk_gated_delta_rule(q, k, v, g=g, beta=-g, initial_state=state, output_final_state=True)

    runs: dict[str, Callable[[], object]] = {
        "pass of 1 token": at_once(1),
        f"pass of {1 + DRAFTS}": at_once(1 + DRAFTS),
        f"pass of {1 + 2 * DRAFTS}": at_once(1 + 2 * DRAFTS),
        f"pass of {1 + DRAFTS} in steps": lambda: runner.forward(ids[:, : 1 + DRAFTS], 1 + DRAFTS),
        "picking states": lambda: runner.rewind([runner.read[0] - REJECTED]),
        "replay": replay,
    }
    for run in runs.values():
        run()
    every = [{name: seconds(run) for name, run in runs.items()} for _ in range(REPEATS)]
    times = {name: median(measured[name] for measured in every) for name in runs}
    ways = {
        "steps": times[f"pass of {1 + DRAFTS} in steps"] + times["picking states"],
        "replay": times[f"pass of {1 + DRAFTS}"] + times["replay"],
        "checkpoint": times[f"pass of {1 + 2 * DRAFTS}"],
    }
    tokens = (1 - ACCEPTANCE ** (1 + DRAFTS)) / (1 - ACCEPTANCE)
    report = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "bytes of a state": layers * state.nbytes,
        "milliseconds": {name: round(1000 * value, 2) for name, value in times.items()},
        "speedup at acceptance 0.8, drafts for free": {
            name: round(tokens * times["pass of 1 token"] / value, 2) for name, value in ways.items()
        },
    }
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
