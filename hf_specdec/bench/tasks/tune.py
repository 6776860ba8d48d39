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
from hf_specdec.bench.arguments import LLAMA_CPP
from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import ENOUGH
from hf_specdec.bench.figures.frames import Part, examples, whole
from hf_specdec.bench.figures.quality import questions_needed
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.inputs.prompts import Prompt, in_turn_by_subtask, question_prompt
from hf_specdec.bench.models.loading import LoadedPair, load_pair, load_pairs
from hf_specdec.bench.models.names import known_drafts, short_name
from hf_specdec.bench.records import Asked, Method, Result, Tuned
from hf_specdec.bench.reports.best_settings import at_the_edge, command, keywords
from hf_specdec.bench.reports.document import Block
from hf_specdec.bench.reports.heading import heading, remarks, terminal
from hf_specdec.bench.reports.markdown import bullets, capital, number, points, ratio, table
from hf_specdec.bench.running.measuring import new
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks.sweep import drafts_of
from hf_specdec.bench.tuning.contest import Batch, Contest, is_fixed

LEGEND = (
    "Speedups are over plain generate() on the same prompts, end to end: the prompt's pass counts, compiling and other "
    "preparation does not. In brackets: 95% interval, by a paired bootstrap over examples and repeats, widened for few "
    f"examples (expanded percentiles, Hesterberg 2015); there is none below {ENOUGH} examples. Candidates that dropped "
    "out have fewer calls, so that figures can rest on different examples. The fastest candidate is chosen on the "
    "calls that it is measured on, which flatters it a little."
)
LOSSY = (
    "A lossy one is chosen only if a loss of more than {most:g} points is excluded, even if one further question lost "
    "all 100; {takes}."
)
SERVERS = (
    "These engines batch requests and have kernels of their own, so another draft length is usually the best there: "
    "try shorter and longer ones under your load. They decode losslessly, with the draft as an ordinary checkpoint."
)


def run(settings: Settings, shared: Processes) -> None:
    """Measure for `settings.minutes`; write the result, its report and a generation_config.json; print the choice."""
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
    for tuned in result.tuned:
        if tuned.choice is not None:
            save_configuration(pairs[0].target, result.method(tuned.choice).keywords, _saved(result, tuned).parent)
    results.finish(result, render)
    sys.stdout.write(terminal(render(result)))


def conclude(result: Result, contests: Sequence[Contest]) -> None:
    """Add the contests' methods, calls and outcomes to the result."""
    contenders = {name: one for contest in contests for name, one in contest.contenders.items()}
    result.methods = [one.method for one in contenders.values()]
    result.calls = [call for contest in contests for call in contest.calls]
    result.cold = [cold for contest in contests for cold in contest.cold]
    result.tuned = [contest.choose() for contest in contests]


def _saved(result: Result, tuned: Tuned) -> Path:
    """The file to which the choice for a batch size is saved."""
    settings = result.settings
    return settings.output_dir / f"{results.stem(settings)}-batch-{tuned.batch}" / GENERATION_CONFIG_NAME


def save_configuration(model: PreTrainedModel, settings: Mapping[str, Any], folder: Path) -> None:
    """Write a `generation_config.json` with which the model speculates wherever it is loaded.

    It is the model's own configuration plus keywords of generate(); the loaded model is not changed. Raises
    `BenchError` if the file cannot be written.
    """
    # A new object: transformers drops additions to one that it derived from the model's configuration.
    own = {name: value for name, value in model.generation_config.to_dict().items() if not name.startswith("_")}
    folder.mkdir(parents=True, exist_ok=True)
    text = GenerationConfig(**{**own, **settings}).to_json_string()
    results.write_bytes(folder / GENERATION_CONFIG_NAME, text.encode())


def _pairs(settings: Settings) -> list[LoadedPair]:
    """Load the target with each of its drafts, or alone if no draft is named or known."""
    if settings.draft_models or settings.assistant_model or known_drafts(settings.model_name):
        return load_pairs(settings, drafts_of(settings))
    print("No draft is known for the target: only methods without one are tried; name one with --assistant_model")
    return [load_pair(replace(settings, assisted_generation=False))]


def _prompts(settings: Settings, pair: LoadedPair, asked: Sequence[questions.Question]) -> list[tuple[Prompt, Asked]]:
    """The first turns of the questions, alternating between subtasks."""
    found = []
    for one in in_turn_by_subtask(asked):
        prompt, cut = question_prompt(pair, one, (), settings.max_new_tokens)
        about = Asked(one.index, one.index, one.subtask, len(prompt.token_ids), cut, references=one.references)
        found.append((prompt, about))
    return found


def _batches(prompts: Sequence[Prompt], size: int) -> list[Batch]:
    """Full batches in this order; prompts are repeated if there are fewer than a batch holds."""
    listed = list(prompts) * -(-size // len(prompts))
    return [tuple(listed[start : start + size]) for start in range(0, len(listed) - size + 1, size)]


def render(result: Result) -> list[Block]:
    """Compose the report."""
    part = whole(result)
    found: list[Block] = [heading(part), _legend(result.settings)]
    for tuned in result.tuned:
        here = part.where(batch=tuned.batch)
        found += [f"## Batch size {tuned.batch}", bullets([*choice(here, tuned), *tuned.notes])]
        found.append(_candidates(here, tuned))
    if lines := servers(result):
        found += ["## Other engines", *lines]
    return [*found, *remarks(part)]


def _legend(settings: Settings) -> str:
    most = settings.max_quality_loss
    if most is None:
        return LEGEND
    takes = f"that takes {questions_needed(most)} questions where no answer changes" if most else "none can show that"
    return f"{LEGEND} {LOSSY.format(most=most, takes=takes)}"


def choice(part: Part, tuned: Tuned) -> list[str]:
    """Sentences on the choice, its settings, its cost of preparation and its close rivals; or why there is none.

    Args:
        part: the calls at this batch size.
    """
    if tuned.choice is None:
        return [_no_choice(part, tuned)]
    result, method = part.result, part.result.method(tuned.choice)
    lines = [f"{capital(method.title)}: {ratio(tuned.ratios[method.name])} times plain generate(), end to end."]
    if method.kind == "none":
        lines.append("Drafting does not pay here: this is plain decoding on a faster engine.")
    if loss := tuned.losses.get(method.name):
        lines.append(f"Difference in quality to plain decoding, in points: {points(loss)}.")
    batch = "" if tuned.batch == 1 else f" --batch_size {tuned.batch}"
    draft = f", where draft is the loaded model `{method.draft}`" if method.draft else ""
    lines.append(f"As keywords: `model.generate(…, {keywords(method)})`{draft}")
    lines.append(f"As a command: `{command(result, method)}{batch}`")
    lines.append(f"To save with the model: `{_saved(result, tuned)}`")
    cold = speed.cold_seconds(part, method, tuned.batch)
    if cold is not None and method.engine not in ("eager", "recorded"):
        lines.append(f"Preparing it takes at most {cold:.1f} s in each process, and again for longer texts.")
    lines += at_the_edge(result.methods, method)
    if tuned.near:
        lines.append(f"Not surely slower: {'; '.join(result.method(name).title for name in tuned.near)}.")
    return lines


def _no_choice(part: Part, tuned: Tuned) -> str:
    if not tuned.ratios:
        return "There is no choice: nothing but plain generate() could be measured. Raise --minutes."
    name, gain = next(iter(tuned.ratios.items()))
    fastest = f"{part.result.method(name).title}, {ratio(gain)} times plain generate()"
    batches = max(1, len(part.result.prompts) // tuned.batch)
    if gain.low is not None:
        why = "Plain generate() is best: nothing else is surely faster at an allowed loss"
        words = "Fastest of the others"
    elif batches < ENOUGH:
        what = "prompts" if tuned.batch == 1 else f"batches of {tuned.batch} prompts"
        why = f"There are too few prompts for a choice: it takes {ENOUGH} different {what}, and there are {batches}"
        words = "Give more (--dataset, --limit). Fastest so far, on too few"
    else:
        why = f"The time was too short for a choice: no candidate was measured on {ENOUGH} different examples"
        words = "Raise --minutes. Fastest so far, on too few"
    return f"{why}. {words}: {fastest}."


def _candidates(part: Part, tuned: Tuned) -> str:
    """A table of all candidates that were tried."""
    return table(
        [
            {
                "Candidate": capital(method.title),
                "n": str(examples(part.of(method.name))),
                "Calls": str(len(part.of(method.name))),
                "Speedup over plain generate()": ratio(speed.speedup(part, method.name, "plain", "end to end")),
                "Quality (points)": points(tuned.losses.get(method.name)),
                "Preparation (s), at most": number(speed.cold_seconds(part, method, tuned.batch), 1),
            }
            for method in tried(part, tuned)
        ]
    )


def tried(part: Part, tuned: Tuned) -> list[Method]:
    """All measured candidates: first the finalists, then the others by number of calls."""
    counts = part.calls["method"].value_counts()
    others = [method for method in part.methods if method.kind != "plain" and method.name not in tuned.ratios]
    others.sort(key=lambda method: -counts[method.name])
    return [*(part.result.method(name) for name in tuned.ratios), *others]


def servers(result: Result) -> list[str]:
    """Server commands with the draft that was chosen at the first batch size that has one; empty without a draft."""
    if result.synthetic or result.encoder_decoder or "draft" not in result.models:
        return []
    for tuned in result.tuned:
        draft = None if tuned.choice is None else result.method(tuned.choice).draft
        if draft is not None:
            listed = tried(whole(result).where(batch=tuned.batch), tuned)
            # The fastest fixed lookahead with this draft.
            fixed = [one.keywords["num_assistant_tokens"] for one in listed if is_fixed(one) and one.draft == draft]
            tokens = next(iter(fixed), 4)
            found = server_commands(result.models["target"].name, draft, tokens, sampling=result.settings.sampling)
            return [*(f"{name}:\n\n    {words}" for name, words in found), SERVERS]
    return []


def server_commands(target: str, draft: str, lookahead: int, *, sampling: bool) -> list[tuple[str, str]]:
    """(engine and version, command) for vLLM, SGLang and llama.cpp, which reads GGUF files.

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
