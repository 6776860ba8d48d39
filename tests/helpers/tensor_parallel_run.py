"""Run by torchrun: decodes with a sharded target, each process with its own seed, and writes what each has got.

Arguments: the folders of target and draft, which is sharded as well and whole, and the folder of the results.
"""

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import hf_specdec

CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, auto": {"do_sample": False, "num_assistant_tokens": "auto"},
    "sampled": {"do_sample": True},
    "sampled, compiled": {"do_sample": True, "compile": True},
    "sampled, auto": {"do_sample": True, "num_assistant_tokens": "auto"},
}


def main(target_folder: str, draft_folder: str, results: str) -> None:
    target = AutoModelForCausalLM.from_pretrained(target_folder, tp_plan="auto")
    plans = {"sharded": {"tp_plan": "auto"}, "replicated": {}}
    drafts = {name: AutoModelForCausalLM.from_pretrained(draft_folder, **plan) for name, plan in plans.items()}
    rank = torch.distributed.get_rank()
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20}
    texts = {"plain": target.generate(ids, **settings, do_sample=False).tolist()}
    for (kind, draft), (name, call) in product(drafts.items(), CALLS.items()):
        torch.manual_seed(rank)
        with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
            texts[f"{kind}, {name}"] = target.generate(ids, **settings, **call).tolist()
    Path(results, f"{rank}.json").write_text(json.dumps(texts))


if __name__ == "__main__":
    main(*sys.argv[1:])
