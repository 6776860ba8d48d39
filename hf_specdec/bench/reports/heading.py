"""The first and last part of every report: the set-up of the run, and remarks on its reliability."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import Part
from hf_specdec.bench.records import Environment, Model, Result
from hf_specdec.bench.reports.columns import quantized_note
from hf_specdec.bench.reports.document import Block, section
from hf_specdec.bench.reports.markdown import bullets, percent

# Tasks on prompts of exact lengths.
_BY_LENGTH = ("benchmark", "decode", "engines")
# If repeats of the same work differ by more than this share of their median, the run was disturbed.
_CALM = 0.25
_MOST_LENGTHS = 4  # most prompt lengths to list one by one
_IDLE = 0.5  # busy cores at the start above which the machine was not quiet


def heading(part: Part) -> str:
    """Title, models, machine, versions, data and settings."""
    result = part.result
    lines = [_model(role, model) for role, model in result.models.items()]
    described = {model.name for model in result.models.values()}
    further = dict.fromkeys(m.draft for m in speed.drafting(part) if m.draft and m.draft not in described)
    lines += [f"further drafts: {', '.join(further)}"] if further else []
    lines.append(_machine(result))
    lines.append(_prompts(part) if result.settings.task in _BY_LENGTH else _data(result))
    lines.append(_shape(part))
    return f"# {result.settings.task.capitalize()}\n\n{bullets(lines)}"


def remarks(part: Part, *more: str) -> list[Block]:
    """A section with notes on the run, and warnings if its times can't be trusted."""
    found = [*more, *part.result.notes, *quantized_note(part.result), *_busy(part.result), *_unsettled(part.result)]
    lines = [*found, *_unrest(part)]
    return section("Remarks", bullets(lines))


def processor(environment: Environment) -> str:
    """The processor's name and widest instructions."""
    return f"{environment.cpu} ({environment.instructions})" if environment.instructions else environment.cpu


def threads(environment: Environment) -> str:
    """The number of threads: `2 threads`."""
    count = environment.torch_threads
    return f"{count} thread{'s' if count > 1 else ''}"


def _model(role: str, model: Model) -> str:
    return (
        f"{role}: {model.name} ({model.kind}, {model.parameters / 1e6:.1f}M parameters, "
        f"{model.dtype}, {model.device}, {model.attention} attention)"
    )


def _machine(result: Result) -> str:
    environment = result.environment
    several = f" in each of {result.processes} parallel processes" if result.processes > 1 else ""
    where = ", ".join([processor(environment), *environment.gpus])
    versions = ", ".join(f"{name} {environment.packages[name]}" for name in ("torch", "transformers"))
    return f"machine: {where}, {threads(environment)}{several}; {versions}"


def _data(result: Result) -> str:
    count = len(result.prompts)
    of_split = "" if result.split is None else f", split {result.split}"
    return f"data: {result.settings.dataset}{of_split}, {count} example{'s' if count > 1 else ''}"


def _prompts(part: Part) -> str:
    """The number of prompts of each length, by batch size if it differs."""
    lengths = {one.index: one.tokens for one in part.result.prompts}
    sizes: dict[str, list[str]] = {}
    for batch in part.batch_sizes:
        decoded = {index for indexes in part.where(batch=batch).calls["indexes"] for index in indexes}
        counts = Counter(lengths[index] for index in decoded)
        words = " and ".join(f"{count} of {tokens} tokens" for tokens, count in sorted(counts.items()))
        if len(counts) > _MOST_LENGTHS:
            words = f"{sum(counts.values())} of {min(counts)} to {max(counts)} tokens"
        sizes.setdefault(words, []).append(str(batch))
    if len(sizes) == 1:
        return f"prompts: {next(iter(sizes))}"
    return "prompts: " + "; ".join(f"{words} at batch size {', '.join(some)}" for words, some in sizes.items())


def _shape(part: Part) -> str:
    settings, sizes = part.result.settings, part.batch_sizes or [1]
    how = "greedy"
    if settings.sampling:
        options = {**sampling_of(part.result), "seed": settings.seed}
        how = "sampling (" + ", ".join(f"{name} {value:g}" for name, value in options.items()) + ")"
    if processors := part.result.models["target"].processors:
        words = ", ".join(f"{name} {value}" for name, value in processors.items())
        how += f" after the target's own processors ({words})"
    parts = [how, f"at most {settings.max_new_tokens} new tokens"]
    found = {m.lookahead for m in speed.drafting(part) if m.lookahead is not None and m.role != "floor"}
    if found:
        parts.append("lookahead " + ", ".join(str(one) for one in sorted(found, key=lambda one: (one == "auto", one))))
    parts.append(f"batch size {', '.join(map(str, sizes))}")
    if settings.task == "tune":
        return f"{', '.join(parts)}, within {settings.minutes:g} minutes"
    return f"{', '.join(parts)}, {settings.repeats} repeat{'s' if settings.repeats > 1 else ''}"


def sampling_of(result: Result) -> dict[str, float]:
    """The sampling settings: those given, or else the target's, or else transformers' defaults."""
    own = result.models["target"].sampling
    return {"temperature": 1.0, "top_k": 50, "top_p": 1.0, **own, **result.settings.given_sampling()}


def _busy(result: Result) -> list[str]:
    busy = result.environment.busy_cores
    if busy is None or busy <= _IDLE:
        return []
    return [f"The machine was not quiet: other work kept {busy:.2f} cores busy at the start."]


def _unsettled(result: Result) -> list[str]:
    cold = () if result.settings.task == "tune" else result.cold  # tune reports its few calls itself
    names = dict.fromkeys(one.method for one in cold if not one.settled)
    words = "Warm-up ended before two calls in a row were within 5% of each other"
    return [f"{words}: {', '.join(names)}."] if names else []


def _unrest(part: Part) -> list[str]:
    """A warning if repeats of the same work took very different times, or if there are no repeats."""
    if not len(part.calls) or part.result.settings.task == "tune":
        return []
    spread = speed.spread(part.calls)
    if spread is None:
        return ["Each figure rests on a single run: one stall of the machine can double it. Raise --repeats."]
    return [f"{unsteady(part)} Close other programs, or raise --repeats."] if spread > _CALM else []


def unsteady(part: Part) -> str:
    """A warning for reports and pictures that repeats of the same work differ much; empty if they don't."""
    spread = speed.spread(part.calls)
    if spread is None or spread <= _CALM:
        return ""
    return f"Times are unsteady: repeats of the same work differ by {percent(spread)} (median)."


def terminal(blocks: Sequence[Block]) -> str:
    """The texts and tables of a report, without pictures."""
    return "\n\n".join(block for block in blocks if isinstance(block, str) and block) + "\n"
