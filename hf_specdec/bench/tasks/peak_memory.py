"""The peak memory of each method, in a process of its own: `python -m hf_specdec.bench.tasks.peak_memory`."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.bench.figures import bandwidth
from hf_specdec.bench.inputs.prompts import Prompt, benchmark_prompts
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.models.precision import import_libraries
from hf_specdec.bench.running.methods import GENERATE, Method
from hf_specdec.bench.running.methods_by_task import of_engines
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.running.warming import MOST_AGAIN, prepared_so_far
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.prepared.freed_memory import return_freed_memory

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PACKAGES = str(Path(__file__).resolve().parents[3])
_COMPILER = "torch._inductor.compile_fx"  # imported by a process that compiles, not by one that finds code on disk
_MOST_PROCESSES = 3


def check_peak_memory(settings: Settings) -> None:
    """Raises `BenchError` where `--peak_memory` is given and can't be had."""
    if settings.peak_memory and sys.platform != "linux" and not torch.cuda.is_available():
        raise BenchError("--peak_memory: on a CPU it is read from /proc, which only Linux has; leave it out here")


def measured_apart(settings: Settings, method: str, engine: str, batch: int) -> dict[str, Any] | None:
    """`measured` in a new process, which loads the pair; None where that process fails.

    A process that had to compile, as `"auto"` chose a length that no earlier call did, is followed by another one.
    """
    asked = replace(settings, engines=() if engine == GENERATE else (engine,), batch_sizes=(batch,))
    request = json.dumps({"settings": asked.to_dict(), "method": method})
    path = os.pathsep.join([_PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])
    for _ in range(_MOST_PROCESSES):
        done = subprocess.run(
            [sys.executable, "-m", "hf_specdec.bench.tasks.peak_memory"],
            input=request,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error"},
        )
        if done.returncode:
            return None
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if not found["compiled"]:
            break
    return found


def measured(
    pair: LoadedPair, method: Method, prompts: Sequence[Prompt], settings: Settings, base: int
) -> dict[str, Any]:
    """Peak memory of calls of one method, until a call prepares nothing: bytes, of the kind of device of the target.

    Args:
        base: bytes that the process held before the pair was loaded, libraries included; counts on a CPU only.
    """
    models = [model for model in pair.models if model.device.type == pair.target.device.type]
    devices = {model.device for model in models}
    context = len(prompts[0].token_ids) + settings.max_new_tokens
    forget_peak(devices)
    for _ in range(1 + MOST_AGAIN):
        before = prepared_so_far(pair)
        timed_call(pair, method, prompts, settings)
        if prepared_so_far(pair) == before:
            break
    return {
        "method": method.name,
        "batch": len(prompts),
        "length": len(prompts[0].token_ids),
        "base_bytes": base if pair.target.device.type == "cpu" else 0,
        "peak_bytes": peak(devices),
        "weight_bytes": sum(bandwidth.stored_bytes(weight) for model in models for weight in model.parameters()),
        "cache_bytes": 0 if pair.encoder_decoder else len(prompts) * _cache_bytes(models, context),
        "compiled": _COMPILER in sys.modules,
    }


def _cache_bytes(models: Iterable[Any], context: int) -> int:
    return sum(bandwidth.cache_bytes(model, context) for model in models)


def libraries_bytes(settings: Settings) -> int:
    """What this process holds before it loads a pair: Python, and the libraries once a tiny model has used them."""
    import_libraries(settings.precision, settings.draft_precision)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    prompt = torch.ones(1, 4, dtype=torch.long)
    LlamaForCausalLM(config).generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, do_sample=False)
    _return_freed_memory()
    return _status("VmRSS")


def forget_peak(devices: Iterable[torch.device]) -> None:
    """From here on, `peak` is that of what follows."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _return_freed_memory()
            _CLEAR.write_text("5")  # proc(5): resets the peak resident set size to the current one


def _return_freed_memory() -> None:
    """Give back to the system what loading has freed, such as the wide weights that were quantized."""
    gc.collect()
    return_freed_memory()


def peak(devices: Iterable[torch.device]) -> int:
    """Bytes allocated by torch at the peak on CUDA devices; on a CPU the process's largest resident set, VmHWM."""
    return sum(torch.cuda.max_memory_allocated(one) if one.type == "cuda" else _status("VmHWM") for one in devices)


def _status(name: str) -> int:
    values = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return 1024 * int(values[name].removesuffix("kB"))


def main() -> None:
    """Reads a request from the standard input, and writes what was measured as one line."""
    request = json.load(sys.stdin)
    settings, name = Settings(**request["settings"]), request["method"]
    base = libraries_bytes(settings) if _STATUS.exists() else 0
    pair = load_pair(settings)
    method = next(method for method in of_engines(settings, pair) if method.name == name)
    lengths = [max(settings.prompt_lengths)]
    prompts = benchmark_prompts(pair, lengths, settings.batch_size, settings.max_new_tokens, spare=method.longest)
    print(json.dumps(measured(pair, method, prompts, settings, base)))


if __name__ == "__main__":
    main()
