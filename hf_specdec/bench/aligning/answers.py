"""Stores the target's answers to prompts, and on request its distributions, on disk as a `datasets.Dataset`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import StaticCache

from hf_specdec.bench.aligning.batches import Collator, answer_logits, in_bfloat16, shared_vocabulary
from hf_specdec.bench.aligning.drawing import drawing
from hf_specdec.bench.aligning.losses import on_tokens
from hf_specdec.bench.inputs.prompts import Prompt, question_prompt
from hf_specdec.bench.inputs.questions import Question
from hf_specdec.bench.inputs.recordings import model_inputs, pad_token
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import as_json
from hf_specdec.bench.running.methods import Contender, plain_on_engine
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.models.cache_names import CACHE_NAME
from hf_specdec.prepared.pass_kernels import pass_kernels

# Dialogues that are answered together: `[turn][row]`.
Group = Sequence[Sequence[Question]]

_PART = 64  # answers per file: an interruption loses no more
_AT_ONCE = 8  # answers whose logits are in memory together
_PAYS = 10_000  # steps from which compiling saves more time than it takes
# The settings that answers depend on.
_ARGUMENTS = (
    "model_name", "chat_template_kwargs", "dtype", "precision", "dataset", "dataset_path", "split", "prompt_column",
    "prompt_template", "limit", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "seed", "top_k_targets",
)  # fmt: skip


def answers_folder(settings: Settings, pair: LoadedPair) -> Path:
    """The folder of a target's answers with these settings, whatever the loss or draft."""
    told = {name: as_json(settings)[name] for name in _ARGUMENTS}
    # A target that was retrained under the same name gives other answers.
    readable = [weight for weight in pair.target.parameters() if weight.device.type != "meta"]
    weights = sum(float(weight.detach().float().abs().sum()) for weight in readable)
    text = json.dumps([told, shared_vocabulary(pair), f"{weights:.5e}"], sort_keys=True)
    return settings.output_dir / f"answers-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def target_answers(
    folder: Path, settings: Settings, pair: LoadedPair, groups: Iterable[Group], shared: Processes,
    contender: Contender | None = None,
) -> Any:  # fmt: skip
    """The answers to `groups` as a `datasets.Dataset`, in all processes; answers in `folder` are reused. None if empty.

    The target decodes without drafts, compiled if there are enough tokens to decode.

    Columns: `index` and `subtask` of the question, `prompt` and `answer` in tokens, `text`. With
    `settings.top_k_targets` = K, also `target_tokens [T][K]` and `target_log_probs [T][K + 1]` at the answer's T
    positions, the rest last (see `losses.on_tokens`), unprocessed, at temperature 1. For a draft cut from an
    encoder-decoder, also `start`, the tokens before the answer's first, and `encoding`, the encoder's output `[S, H]`
    in float16.

    Args:
        contender: decodes in this way instead.

    Raises:
        BenchError: the models refuse the call.
    """
    # Here because it takes seconds.
    import datasets

    datasets.disable_progress_bars()
    folder.mkdir(parents=True, exist_ok=True)
    known = {index for part in _parts(folder) for index in datasets.load_from_disk(part)["index"]}
    listed = groups if isinstance(groups, Sequence) else None
    share = groups if listed is None else shared.share(listed)
    todo = (group for group in share if any(q.index not in known for turn in group for q in turn))
    mine = todo if listed is None else list(todo)
    shared.wait()  # no process writes before all have read
    if contender is None:
        compile = settings.compile or len(listed or ()) * settings.max_new_tokens >= _PAYS
        engine = {"compile": compile, "cache_implementation": settings.cache_implementation}
        contender = plain_on_engine(engine, pair)
    rows: list[dict[str, Any]] = []
    bar = tqdm(mine, desc=f"answers, {folder.name}", unit="batch", file=sys.stderr, disable=not shared.main)
    for group in bar:
        rows += _answered(settings, contender, group)
        if len(rows) >= _PART:
            _write(datasets.Dataset.from_list(rows), folder / f"part-{uuid4().hex}")
            rows = []
    if rows:
        _write(datasets.Dataset.from_list(rows), folder / f"part-{uuid4().hex}")
    shared.wait()
    parts = [datasets.load_from_disk(part) for part in _parts(folder)]
    return datasets.concatenate_datasets(parts).sort("index") if parts else None


def _answered(settings: Settings, contender: Contender, group: Group) -> list[dict[str, Any]]:
    """One row per question; later turns continue after the answers to earlier ones."""
    pair = contender.pair
    texts: list[list[str]] = [[] for _ in group[0]]
    rows: list[dict[str, Any]] = []
    for turn in group:
        asked = zip(turn, texts, strict=True)
        prompts = [question_prompt(pair, question, earlier, settings.max_new_tokens)[0] for question, earlier in asked]
        # Each pass of plain generate() is seen, so the distributions need no further pass.
        seen = settings.top_k_targets if contender.method.kind == "plain" else None
        # For 16 rows in float32, they make a pass of SmolLM2-135M 1.4 times as fast (two cores of an AMD Zen 3).
        kernels = pass_kernels(pair.target) if seen and pair.target.dtype == torch.float32 else nullcontext
        try:
            with kernels():
                reader, drawn = drawing(_reading_once(contender, prompts, settings), settings)
                with _noted(pair, seen) as passes:
                    call = timed_call(reader, prompts, drawn)
        except ValueError as error:
            raise BenchError(" ".join(str(error).split())) from error
        new = []
        for earlier, prompt, tokens in zip(texts, prompts, call.tokens or (), strict=True):
            text = pair.tokenizer.decode(tokens, skip_special_tokens=True).strip()
            earlier.append(text)
            about = {"index": prompt.index, "subtask": prompt.label, "text": text}
            about |= {"recording": prompt.recording} if prompt.recording else {}
            new.append({**about, "prompt": list(prompt.token_ids), "answer": list(tokens)})
        if passes.steps:
            likely, log_probs = (torch.stack(side, dim=1).tolist() for side in zip(*passes.steps, strict=True))
            for place, row in enumerate(new):
                length = len(row["answer"])
                row |= {"target_tokens": likely[place][:length], "target_log_probs": log_probs[place][:length]}
        elif settings.top_k_targets is not None:
            with in_bfloat16(pair.target):
                _add_distributions(pair, new, settings.top_k_targets)
        if settings.task == "draft" and passes.encoding is not None and passes.start is not None:
            for row, start, encoding in zip(new, passes.start.tolist(), passes.encoding, strict=True):
                read = encoding if "recording" in row else encoding[: len(row["prompt"])]
                row |= {"start": start, "encoding": read.cpu().half().numpy().tobytes()}
        rows += new
    return rows


def _reading_once(contender: Contender, prompts: Sequence[Prompt], settings: Settings) -> Contender:
    """Plain generate() with a cache that holds the prompts up to their last tokens; equal prompts are read once.

    The cache is static: one that grows would be copied at every step.
    """
    pair = contender.pair
    first = {prompt.token_ids: prompt for prompt in prompts}
    if contender.method.kind != "plain" or pair.encoder_decoder or min(map(len, first)) < 2:
        return contender
    inputs = model_inputs(pair, list(first.values()), pair.target)
    width = inputs["input_ids"].shape[1]
    cache = StaticCache(config=pair.target.config, max_cache_len=width + settings.max_new_tokens)
    # On a GPU, generate() would compile for each size of the cache.
    models = {**contender.models, CACHE_NAME: cache, "disable_compile": True}
    beginnings = {name: tensor[:, :-1] for name, tensor in inputs.items()}
    pair.target.generate(**beginnings, **models, max_new_tokens=1, do_sample=False, pad_token_id=pad_token(pair))
    if len(first) < len(prompts):
        places = {tokens: place for place, tokens in enumerate(first)}
        rows = [places[prompt.token_ids] for prompt in prompts]
        cache.reorder_cache(torch.tensor(rows, device=pair.target.device))
    return replace(contender, models=models)


@dataclass
class _Passes:
    """What `_noted` has seen: (tokens, log-probabilities) of each pass, and how an encoder-decoder started."""

    steps: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    start: Tensor | None = None
    encoding: Tensor | None = None


@contextmanager
def _noted(pair: LoadedPair, count: int | None) -> Iterator[_Passes]:
    """Record each pass's `count` most likely tokens `[B, K]`, and their log-probabilities as in `losses.on_tokens`."""
    found = _Passes()

    def keep(model: Any, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
        """Record a pass, as a forward hook."""
        if keywords.get("use_cache") is False:
            return  # Whisper's pass that detects the language
        if found.start is None and pair.encoder_decoder:
            found.start, found.encoding = keywords["decoder_input_ids"], output.encoder_last_hidden_state
        logits = output.logits[:, -1, : shared_vocabulary(pair)]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        tokens = logits.topk(count).indices
        found.steps.append((tokens, on_tokens(logits, tokens)))

    hook = None if count is None else pair.target.register_forward_hook(keep, with_kwargs=True)
    try:
        yield found
    finally:
        if hook is not None:
            hook.remove()


@torch.no_grad()
def _add_distributions(pair: LoadedPair, rows: list[dict[str, Any]], count: int) -> None:
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        logits = answer_logits(pair.target, Collator(pair)(some))[:, : shared_vocabulary(pair)]
        tokens = logits.topk(count).indices
        lengths = [len(row["answer"]) for row in some]
        parts = zip(some, tokens.split(lengths), on_tokens(logits, tokens).split(lengths), strict=True)
        for row, their, log_probs in parts:
            row |= {"target_tokens": their.tolist(), "target_log_probs": log_probs.tolist()}


def _parts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix != ".partial")


def _write(rows: Any, path: Path) -> None:
    """Write rows to `path` completely or not at all.

    Raises:
        BenchError: the disk is full or cannot be written to.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        rows.save_to_disk(partial)
        os.replace(partial, path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise BenchError(
            f"--output_dir: writing to {str(path.parent)!r} failed ({error.strerror}); give a folder that has room "
            "and can be written to"
        ) from error
