"""A draft and lookahead as commands for vLLM, SGLang and llama.cpp.

Option names are those of the named versions and may change in others.
"""

from __future__ import annotations

import json
import shlex

from hf_specdec.bench.models.known_pairs import short_name

REMARK = (
    "These engines batch requests and have kernels of their own, so another draft length is usually the best there: "
    "try shorter and longer ones under your load. They decode losslessly, with the draft as an ordinary checkpoint."
)


def commands(target: str, draft: str, lookahead: int, *, sampling: bool) -> list[tuple[str, str]]:
    """(engine and version, command) of vLLM, SGLang and llama.cpp; the last one reads GGUF files."""
    method = "probabilistic" if sampling else "greedy"
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": lookahead}
    vllm = ["vllm", "serve", target, "--speculative-config", json.dumps(config | {"draft_sample_method": method})]
    sglang = [
        "python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "STANDALONE",
        "--speculative-draft-model-path", draft, "--speculative-num-steps", str(lookahead),
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(lookahead + 1),
    ]  # fmt: skip
    llama = [
        "llama-server", "--model", _gguf(target), "--spec-type", "draft-simple", "--model-draft", _gguf(draft),
        "--spec-draft-n-max", str(lookahead), "--spec-draft-sampling", method,
    ]  # fmt: skip
    written_for = ("vLLM 0.30", "SGLang, commit 067ad4d", "llama.cpp, commit 00dc805; GGUF files of both models")
    return [(name, shlex.join(words)) for name, words in zip(written_for, (vllm, sglang, llama), strict=True)]


def _gguf(model: str) -> str:
    return short_name(model) + ".gguf"
