"""Finds the draft, strategy, settings and engine that are fastest on your prompts, within a given time."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from hf_specdec.bench import results
from hf_specdec.bench.arguments import (
    DATA,
    ENGINES,
    LLAMA_CPP,
    MODELS,
    SAMPLING,
    WORK,
    OneLineParser,
    task_parser,
)
from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import ENOUGH
from hf_specdec.bench.figures.frames import Part, whole
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.inputs.prompts import Prompt, question_prompt
from hf_specdec.bench.models.loading import LoadedPair, load_pair, load_pairs
from hf_specdec.bench.models.names import known_drafts, short_name
from hf_specdec.bench.records import Asked, Interval, Method, Result, Tuned
from hf_specdec.bench.reports.best_settings import at_the_edge, command, keywords
from hf_specdec.bench.reports.document import Block, Picture
from hf_specdec.bench.reports.heading import heading, remarks, terminal
from hf_specdec.bench.reports.markdown import bullets, capital, number, points, ratio, table
from hf_specdec.bench.running.measuring import new
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks.sweep import drafts_of
from hf_specdec.bench.tuning.contest import Batch, Contest, deciding_race

SHARED = False
DEFAULTS = Settings(
    task="tune", max_new_tokens=128, assisted_generation=True, engines=ENGINES, embedded_limit=10
)  # fmt: skip

LEGEND = (
    "Speedups are over plain generate() on the same prompts, end to end: the prompt's pass counts, compiling and other "
    "preparation does not. In brackets: 95% interval, by a paired bootstrap over examples and repeats, widened for few "
    f"examples (expanded percentiles, Hesterberg 2015); there is none below {ENOUGH} examples. Stage: the last "
    "one that a candidate was measured in, of successive halving; figures of different stages rest on different "
    "examples. The fastest candidate is chosen on the calls that it is measured on, which flatters it a little. A "
    "lossy one is chosen only if a loss greater than allowed is excluded, even if one further question lost all 100."
)
SERVERS = (
    "These engines batch requests and have kernels of their own, so another draft length is usually the best there: "
    "try shorter and longer ones under your load. They decode losslessly, with the draft as an ordinary checkpoint."
)


def parser() -> OneLineParser:
    """The arguments of this task."""
    work = tuple(name for name in WORK if name != "repeats")
    names = (
        *MODELS, "draft_models", "assisted_generation", *SAMPLING, *DATA, "reference_column", "engines", "minutes",
        "max_quality_loss", *work,
    )  # fmt: skip
    limit = f"examples per subtask (default: all; embedded: {DEFAULTS.embedded_limit})"
    return task_parser(DEFAULTS, names, str(__doc__), several=("batch_sizes", "engines"), help={"limit": limit})


def run(settings: Settings, shared: Processes) -> None:
    """Measures for `settings.minutes`; writes the result, its report and a generation_config.json; prints the choice.

    Raises `BenchError` for what the user can put right.
    """
    if beyond := sorted(set(settings.engines) & set(LLAMA_CPP)):
        raise BenchError(f"--engines: {beyond[0]} is for --task engines; leave it out")
    end = time.perf_counter() + 60 * settings.minutes
    dialogues = questions.dialogues(settings)
    pairs = _pairs(settings)
    asked = _prompts(settings, pairs[0], [dialogue[0] for dialogue in dialogues])
    result = new(settings, [plain(pair) for pair in pairs])
    result.split = questions.split_of(settings)
    result.prompts = sorted((about for _, about in asked), key=lambda one: one.index)
    contests = []
    for place, size in enumerate(settings.batch_sizes):
        contests.append(Contest(result, pairs, _batches([prompt for prompt, _ in asked], size)))
        contests[-1].run((end - time.perf_counter()) / (len(settings.batch_sizes) - place))
    conclude(result, contests)
    stem = settings.output_dir / results.stem(settings)
    for tuned in result.tuned:
        if tuned.choice is not None:
            folder = Path(f"{stem}-batch-{tuned.batch}")
            save_configuration(pairs[0].target, result.method(tuned.choice).keywords, folder)
    results.finish(result, render)
    sys.stdout.write(_said(whole(result), stem))


def conclude(result: Result, contests: Sequence[Contest]) -> None:
    """Puts the contests' methods, calls and outcomes into the result."""
    contenders = {name: one for contest in contests for name, one in contest.contenders.items()}
    result.methods = [one.method for one in contenders.values()]
    result.calls = [call for contest in contests for call in contest.calls()]
    result.cold = [cold for contest in contests for cold in contest.cold]
    result.tuned = [contest.choose() for contest in contests]


def save_configuration(model: PreTrainedModel, settings: Mapping[str, Any], folder: Path) -> None:
    """Writes a `generation_config.json` with which the model speculates wherever it is loaded.

    It is the model's own configuration with keywords of generate() added; the model stays as it is. Raises
    `BenchError` where it can't be written.
    """
    # A new object: transformers drops what was added to one that it derived from the model's configuration.
    own = {name: value for name, value in model.generation_config.to_dict().items() if not name.startswith("_")}
    folder.mkdir(parents=True, exist_ok=True)
    text = GenerationConfig(**{**own, **settings}).to_json_string()
    results.write_bytes(folder / GENERATION_CONFIG_NAME, text.encode())


def _pairs(settings: Settings) -> list[LoadedPair]:
    """The target with each of its drafts; alone where none is named or known."""
    if settings.draft_models or settings.assistant_model or known_drafts(settings.model_name):
        return load_pairs(settings, drafts_of(settings))
    print("No draft is known for the target: only methods without one are tried; name one by --assistant_model")
    return [load_pair(replace(settings, assisted_generation=False))]


def _prompts(settings: Settings, pair: LoadedPair, asked: Sequence[questions.Question]) -> list[tuple[Prompt, Asked]]:
    """First turns, the subtasks in turn, so that the first few already are of every kind."""
    seen: dict[str, int] = {}
    ordered = []
    for one in asked:
        seen[one.subtask] = seen.get(one.subtask, 0) + 1
        prompt, cut = question_prompt(pair, one, (), settings.max_new_tokens)
        about = Asked(one.index, one.index, one.subtask, len(prompt.token_ids), cut, references=one.references)
        ordered.append((seen[one.subtask], one.index, (prompt, about)))
    return [both for *_, both in sorted(ordered, key=lambda item: item[:2])]


def _batches(prompts: Sequence[Prompt], size: int) -> list[Batch]:
    """Full batches in this order; the prompts again and again where there are fewer than a batch holds."""
    listed = list(prompts) * -(-size // len(prompts))
    return [tuple(listed[start : start + size]) for start in range(0, len(listed) - size + 1, size)]


def render(result: Result) -> list[Block]:
    """The report."""
    part = whole(result)
    found: list[Block] = [heading(part), LEGEND]
    for tuned in result.tuned:
        here = part.where(batch=tuned.batch)
        found += [f"## Batch size {tuned.batch}", bullets([*choice(part, tuned), *tuned.notes])]
        shown = [result.method(name) for name in last_ratios(tuned)]
        if shown:
            arguments = (here, shown, ("plain",), "end to end")
            found.append(Picture(f"candidates-batch-{tuned.batch}", "gains.of_methods", arguments))
        found.append(_candidates(part, tuned))
    if lines := servers(result):
        found += ["## Other engines", *lines]
    return [*found, *remarks(part)]


def _said(part: Part, stem: Path) -> str:
    """The choices, the commands for other engines, and where the files are."""
    lines = []
    for tuned in part.result.tuned:
        lines += [f"Batch size {tuned.batch}", *(f"- {line}" for line in choice(part, tuned))]
        if tuned.choice is not None:
            lines.append(f"- To save with the model: {stem}-batch-{tuned.batch}/{GENERATION_CONFIG_NAME}")
        lines += [f"- {note}" for note in tuned.notes]
    lines += servers(part.result)
    return "\n".join([*lines, terminal(remarks(part)), f"All that was tried: {stem}.md"]) + "\n"


def choice(part: Part, tuned: Tuned) -> list[str]:
    """The choice, its settings, its cost of preparation, and what was as fast; or why there is none."""
    result = part.result
    lines = _no_choice(part, tuned) if tuned.choice is None else _choice(part, tuned, result.method(tuned.choice))
    number = deciding_race(tuned.races)
    if number is not None and any(race and race[-1].kept for race in tuned.races[number + 1 :]):
        lines.append(
            f"The engines that need preparation were compared on fewer than {ENOUGH} different examples, too few to "
            "count. Raise --minutes or give more prompts."
        )
    return lines


def _no_choice(part: Part, tuned: Tuned) -> list[str]:
    best = next(iter(last_ratios(tuned).items()), None)
    if best is None:
        return ["There is no choice: nothing but plain generate() could be measured. Raise --minutes."]
    fastest = f"{part.result.method(best[0]).title}, {ratio(best[1])} times plain generate()"
    if best[1].low is not None:
        words = "Plain generate() is best: nothing else is surely faster at an allowed loss"
        return [f"{words}. Fastest of the others: {fastest}."]
    batches = max(1, len(part.result.prompts) // tuned.batch)
    why = (
        f"The time was too short for a choice: no candidate was measured on {ENOUGH} different examples. "
        "Raise --minutes."
    )
    if batches < ENOUGH:
        what = "prompts" if tuned.batch == 1 else f"batches of {tuned.batch} prompts"
        why = (
            f"There are too few prompts for a choice: it takes {ENOUGH} different {what}, and there are {batches}. "
            "Give more (--dataset, --limit)."
        )
    return [f"{why} Fastest so far, on too few: {fastest}."]


def _choice(part: Part, tuned: Tuned, method: Method) -> list[str]:
    result = part.result
    gain = last_ratios(tuned)[method.name]
    lines = [f"{capital(method.title)}: {ratio(gain)} times plain generate(), end to end."]
    if method.kind == "none":
        lines.append("Drafting does not pay here: this is plain decoding on a faster engine.")
    if loss := tuned.losses.get(method.name):
        lines.append(f"Difference in quality to plain decoding, in points: {points(loss)}.")
    batch = "" if tuned.batch == 1 else f" --batch_size {tuned.batch}"
    draft = f", where draft is the loaded model `{method.draft}`" if method.draft else ""
    lines.append(f"As keywords: `model.generate(…, {keywords(method)})`{draft}")
    lines.append(f"As a command: `{command(result, method)}{batch}`")
    cold = speed.cold_seconds(part, method, tuned.batch)
    if cold is not None and method.engine != "eager":
        lines.append(f"Preparing it takes at most {cold:.1f} s in each process, and again for longer texts.")
    lines += at_the_edge(result.methods, method)
    if tuned.near:
        lines.append(f"Not surely slower: {'; '.join(result.method(name).title for name in tuned.near)}.")
    return lines


def last_ratios(tuned: Tuned) -> dict[str, Interval]:
    """The ratios of the last stage of the race that decides, in the order of its ranking."""
    number = deciding_race(tuned.races)
    if number is None:
        return {}
    stage = tuned.races[number][-1]
    return {name: stage.ratios[name] for name in stage.kept}


def tried(tuned: Tuned) -> list[tuple[str, str, Interval, int]]:
    """(candidate, last stage as race.stage, its ratio there, examples); those that got furthest come first.

    Of the race that decides, before those of the others.
    """
    found: dict[str, tuple[str, str, Interval, int]] = {}
    decides = deciding_race(tuned.races)
    races = sorted(enumerate(tuned.races, start=1), key=lambda item: (item[0] - 1 != decides, -item[0]))
    for number_of_race, race in races:
        for number_of_stage, stage in reversed(list(enumerate(race, start=1))):
            for name, gain in sorted(stage.ratios.items(), key=lambda item: -item[1].value):
                found.setdefault(name, (name, f"{number_of_race}.{number_of_stage}", gain, stage.examples))
    return list(found.values())


def _candidates(part: Part, tuned: Tuned) -> str:
    """All that were tried."""
    rows = [
        {
            "Candidate": capital(part.result.method(name).title),
            "Stage": stage,
            "n": str(examples),
            "Speedup over plain generate()": ratio(gain),
            "Quality (points)": points(tuned.losses.get(name)),
            "Preparation (s), at most": number(speed.cold_seconds(part, part.result.method(name), tuned.batch), 1),
        }
        for name, stage, gain, examples in tried(tuned)
    ]
    return table(rows) if rows else ""


def servers(result: Result) -> list[str]:
    """Commands with the chosen draft of the first batch size that has one; none without a draft model."""
    if result.synthetic or "draft" not in result.models:
        return []
    for tuned in result.tuned:
        draft = None if tuned.choice is None else result.method(tuned.choice).draft
        if draft is not None and not result.encoder_decoder:
            tokens = fixed_lookahead(result, tuned, draft)
            found = server_commands(result.models["target"].name, draft, tokens, sampling=result.settings.sampling)
            return [*(f"{name}:\n\n    {words}" for name, words in found), SERVERS]
    return []


def fixed_lookahead(result: Result, tuned: Tuned, draft: str) -> int:
    """The lookahead of the fastest candidate with this draft that drafts equally many tokens in every round."""
    for method in (result.method(name) for name, *_ in tried(tuned)):
        steady = method.kind == "speculative" and not {"entropy_threshold", "drafter"} & set(method.keywords)
        if steady and method.draft == draft and isinstance(method.lookahead, int):
            return method.lookahead
    return 4


def server_commands(target: str, draft: str, lookahead: int, *, sampling: bool) -> list[tuple[str, str]]:
    """(engine and version, command) of vLLM, SGLang and llama.cpp; the last one reads GGUF files.

    Option names are those of the named versions and may change in others.
    """
    method = "probabilistic" if sampling else "greedy"
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": lookahead}
    vllm = ["vllm", "serve", target, "--speculative-config", json.dumps(config | {"draft_sample_method": method})]
    sglang = [
        "python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "STANDALONE",
        "--speculative-draft-model-path", draft, "--speculative-num-steps", str(lookahead),
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(lookahead + 1),
    ]  # fmt: skip
    target_file, draft_file = (f"{short_name(model)}.gguf" for model in (target, draft))
    llama = [
        "llama-server", "--model", target_file, "--spec-type", "draft-simple", "--model-draft", draft_file,
        "--spec-draft-n-max", str(lookahead), "--spec-draft-sampling", method,
    ]  # fmt: skip
    written_for = ("vLLM 0.30", "SGLang, commit 067ad4d", "llama.cpp, commit 00dc805; GGUF files of both models")
    return [(name, shlex.join(words)) for name, words in zip(written_for, (vllm, sglang, llama), strict=True)]
