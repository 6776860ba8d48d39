"""Predicts what each drafter would have gained on known answers: tokens per round, acceptance and speed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

from hf_specdec.bench import results
from hf_specdec.bench.arguments import LLAMA_CPP
from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import Part, acceptance_rate, frame, tokens_per_round, whole
from hf_specdec.bench.inputs.logs import Logged, logged
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.models.synthetic import is_synthetic
from hf_specdec.bench.records import Asked, Method, Result
from hf_specdec.bench.replaying.calls import REMEMBERING, replayed_calls
from hf_specdec.bench.replaying.rounds import Known
from hf_specdec.bench.replaying.times import Kind, RoundTimes, given_times, measured_times, some_texts
from hf_specdec.bench.reports import columns
from hf_specdec.bench.reports.columns import Cell, method_table
from hf_specdec.bench.reports.document import Block, section
from hf_specdec.bench.reports.heading import heading, remarks, terminal
from hf_specdec.bench.reports.markdown import bullets, capital, number, percent, ratio
from hf_specdec.bench.running.measuring import measured, new
from hf_specdec.bench.running.methods import ENGINES, Contender, ours, plain, plain_on_engine
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.config import COPYING, DRAFTERS, OWN_DRAFTERS, SpeculationConfig
from hf_specdec.drafting.two_vocabularies import needs_translation

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, 16, "auto")

LEGEND = (
    "Nothing was decoded with a draft: drafters drafted along known answers, and a draft counts as accepted as far as "
    "it agrees with the answer. n: different examples. Tokens/Round includes the target's own token. α: share of the "
    "drafted positions reached that were accepted; in sampling with a draft model, the overlap of both distributions. "
    "Predicted: from the times of rounds in short calls on a few prompts, by tokens drafted and verified, or from "
    "the given times of passes. As in every task, the first round doesn't count in speeds. Remembering: all answers "
    "before this one in the log can be copied as well."
)
COMPARED = "The same methods, decoded: the replayed figure, the measured one, and the difference between them."


def run(settings: Settings, shared: Processes) -> None:
    """Replay, write the result and its report, print the tables."""
    check(settings)
    pair = load_pair(settings, weights=runs_target(settings))
    check_pair(pair)
    contenders = compared(settings, pair)
    # Read before the target answers, since they may be malformed.
    drafts = any(one.method.draft for one in contenders)
    given = given_times(settings.pass_times, drafts=drafts) if settings.pass_times else None
    result, known = answered(settings, contenders, logged(settings, pair))
    times, notes = timed(settings, contenders, known, given)
    start = time.perf_counter()
    contenders = remembering(contenders) if len(known) > 1 else contenders
    result.methods = [one.method for one in contenders]
    result.replayed = replayed_calls(settings, contenders, known, times)
    result.notes += [*notes, f"Replaying took {time.perf_counter() - start:.1f} s."]
    results.finish(result, render)
    sys.stdout.write(terminal(render(result)))


def check(settings: Settings) -> None:
    """Raise `BenchError` for arguments that don't go together."""
    if beyond := sorted(set(settings.engines) & set(LLAMA_CPP)):
        raise BenchError(f"--engines: {beyond[0]} is for --task engines; leave it out")
    if is_synthetic(settings.model_name):
        raise BenchError(f"--model_name: {settings.model_name!r} has random weights; give a trained model")


def check_pair(pair: LoadedPair) -> None:
    """Raise `BenchError` for models whose answers cannot be replayed."""
    if pair.encoder_decoder:
        raise BenchError(f"--model_name: {pair.target_name!r} is an encoder-decoder model; give a decoder-only one")
    if pair.draft is not None and needs_translation(pair.target, pair.draft, pair.tokenizer, pair.draft_tokenizer):
        raise BenchError(f"--assistant_model: {pair.draft_name!r} has another tokenizer; give one with the target's")


def runs_target(settings: Settings) -> bool:
    """Whether the target's weights are needed; otherwise its tokenizer and settings suffice."""
    reads = settings.sampling and settings.uses_draft
    return settings.check or settings.answer_column is None or not settings.pass_times or reads


def compared(settings: Settings, pair: LoadedPair) -> list[Contender]:
    """Plain generate(), then on each engine plain decoding and every drafter at every lookahead.

    Drafters that need a draft model take part only if there is one.
    """
    has_model, known = pair.draft is not None, [name for name in DRAFTERS if name not in OWN_DRAFTERS]
    names = settings.grid.get("drafter") or known
    asked = [SpeculationConfig(drafter=name).choosing(has_model=has_model) for name in names]
    lacking = [one.drafter for one in asked if one.drafts_by_model and pair.draft is None]
    if lacking and "drafter" in settings.grid:
        raise BenchError(f"--drafter: {lacking[0]!r} needs a draft model here; give one with --assistant_model")
    drafters = dict.fromkeys(one.drafter for one in asked if one.drafter not in ("none", *lacking))
    found = [plain(pair)]
    for engine in settings.engines:
        found.append(plain_on_engine(ENGINES[engine], pair))
        for drafter, tokens in product(drafters, settings.grid.get("num_assistant_tokens") or LOOKAHEADS):
            keywords = {"num_assistant_tokens": tokens, "drafter": drafter, **ENGINES[engine]}
            name = f"{drafter} {tokens} {engine}"
            found.append(ours("speculative", keywords, pair, name=name, title=f"{drafter}, γ = {tokens}, {engine}"))
    return found


def remembering(contenders: Sequence[Contender]) -> list[Contender]:
    """The contenders, each that copies followed by one that also copies from the log's earlier answers."""
    found = []
    for one in contenders:
        found.append(one)
        if (drafter := one.method.keywords.get("drafter")) in COPYING:
            title = one.method.title.replace(drafter, f"{drafter}, remembering earlier answers", 1)
            found.append(one.told(name=f"{one.name} {REMEMBERING}", title=title, role=REMEMBERING))
    return found


def answered(
    settings: Settings, contenders: Sequence[Contender], log: Sequence[Logged]
) -> tuple[Result, list[tuple[Logged, Known]]]:
    """The result with the calls that were made, and the answers, logged or just decoded."""
    pair = contenders[0].pair
    answers = [one.answer for one in log]
    if settings.check or settings.answer_column is None:
        decoding = contenders if settings.check else contenders[:1]
        found = measured(settings, decoding, [[(one.prompt,) for one in log]], passes_of=set())
        assert found is not None, "one process alone"
        result = found
        told = {call.prompts[0]: call for call in result.calls if (call.method, call.repeat) == ("plain", 0)}
        own = [told[one.prompt.index].tokens for one in log]
        if settings.answer_column is None:
            answers = [rows[0] for rows in own if rows is not None]
        else:
            same = sum(rows is not None and rows[0] == answer for rows, answer in zip(own, answers, strict=True))
            result.notes.append(f"Plain generate() reproduced {same} of {len(log)} logged answers.")
    else:
        result = new(settings, contenders)
        result.prompts = [
            Asked(one.prompt.index, one.prompt.index, one.prompt.label, len(one.prompt.token_ids), one.cut)
            for one in log
        ]
    if cut := sum(one.cut > 0 for one in log):
        result.notes.append(f"{cut} of {len(log)} prompts were longer than the context and cut on the left.")
    texts = zip(log, answers, strict=True)
    eos, most = pair.eos_tokens, settings.max_new_tokens
    return result, [(one, Known(one.prompt.token_ids, answer, eos, most)) for one, answer in texts if answer]


def timed(
    settings: Settings,
    contenders: Sequence[Contender],
    known: Sequence[tuple[Logged, Known]],
    given: RoundTimes | None,
) -> tuple[dict[Kind, RoundTimes], list[str]]:
    """The times of rounds, given or measured on a few of the prompts; notes on them."""
    found: dict[Kind, RoundTimes] = {}
    texts = [(one.prompt, text.answer) for one, text in known]
    for engine in dict.fromkeys(one.method.engine for one in contenders[1:]):
        here = [one for one in contenders if one.method.engine == engine]
        if given is not None:
            found |= {Kind.of(one.method): given for one in here}
        else:
            found |= measured_times(settings, here, some_texts(texts))
    notes = []
    for engine in dict.fromkeys(kind.engine for kind in found):
        here_by_kind = {kind: times for kind, times in found.items() if kind.engine == engine}
        shared = next(iter(here_by_kind.values())).passes.target
        notes.append(f"Verification on the {engine} engine, in ms, by tokens: {_milliseconds(shared)}.")
        notes += [
            f"A draft step of {kind.drafter} on the {engine} engine, in ms, by steps in a row: "
            f"{_milliseconds(times.passes.draft)}."
            for kind, times in here_by_kind.items()
            if times.passes.draft and not kind.automatic
        ]
    return found, notes


def _milliseconds(seconds: Mapping[int, float]) -> str:
    return ", ".join(f"{number} {1000 * taken:.2f}" for number, taken in sorted(seconds.items()))


def render(result: Result) -> list[Block]:
    """Compose the report."""
    part, calls = Part(result, frame(result.replayed, result.prompts)), whole(result)
    found: list[Block] = [heading(part), LEGEND]
    shown = COLUMNS if len(speed.engines_of(part)) > 1 else {k: v for k, v in COLUMNS.items() if k != "Engine"}
    found += [method_table({"": part}, shown, methods=speed.drafting)]
    found += ["## Best by prediction", bullets([_best(part, engine) for engine in speed.engines_of(part)])]
    both = [method for method in speed.drafting(part) if method in calls.methods]
    if both:
        table = method_table({"": part}, _beside(calls), methods=lambda _: both)
        found += section("Replayed and measured", COMPARED, bullets(_differences(part, calls, both)), table)
    return [*found, *remarks(calls if both else Part(result, calls.calls[:0]))]


def _best(part: Part, engine: str) -> str:
    best = speed.fastest(part, speed.drafting(part, engine))
    gain = None if best is None else speed.over(part, best, "engine")
    if best is None or gain is None:
        return f"{capital(engine)}: no answer is long enough to predict a speed."
    pays = "" if gain.value > 1 else " Drafting does not pay there."
    return f"{capital(best.title)}: {ratio(gain)} times plain decoding on the same engine.{pays}"


COLUMNS: Mapping[str, Cell] = {
    "Drafter": lambda part, method: method.title.partition(", γ")[0],
    "Engine": lambda part, method: method.engine,
    "γ": lambda part, method: str(method.lookahead),
    **columns.N,
    **columns.ACCEPTANCE,
    **columns.TOKENS,
    **columns.ALPHA,
    "Predicted speedup over plain on the same engine": lambda part, method: ratio(speed.over(part, method, "engine")),
    "Predicted Tokens/Sec": columns.RATE["Tokens/Sec"],
}


def _speedup(part: Part, method: Method) -> float | None:
    found = speed.over(part, method, "engine")
    return None if found is None else found.value


FIGURES: Mapping[str, Callable[[Part, Method], float | None]] = {
    "Tokens/Round": lambda part, method: tokens_per_round(part.of(method.name)),
    "Acceptance": lambda part, method: acceptance_rate(part.of(method.name)),
    "Speedup over plain on the same engine": _speedup,
}


def _beside(calls: Part) -> dict[str, Cell]:
    found: dict[str, Cell] = {"Method": columns.title}
    for title in FIGURES:
        found[f"{title}, replayed"] = partial(_figure, title, None)
        found[f"{title}, measured"] = partial(_figure, title, calls)
        found[f"{title}, difference"] = partial(_difference, title, calls)
    return found


def _figure(title: str, calls: Part | None, part: Part, method: Method) -> str:
    found = FIGURES[title](calls or part, method)
    return percent(found) if title == "Acceptance" else number(found, 2)


def _difference(title: str, calls: Part, part: Part, method: Method) -> str:
    return percent(_apart(title, part, calls, method))


def _apart(title: str, part: Part, calls: Part, method: Method) -> float | None:
    """(replayed − measured) / measured, or None if either is missing."""
    ours, theirs = (FIGURES[title](side, method) for side in (part, calls))
    return None if ours is None or not theirs else ours / theirs - 1


def _differences(part: Part, calls: Part, methods: Sequence[Method]) -> list[str]:
    """Sentences on the largest difference of each figure."""
    lines = []
    for words in ("fixed", "automatic"):
        some = [method for method in methods if (method.lookahead == "auto") == (words == "automatic")]
        for title in FIGURES:
            found = [abs(one) for method in some if (one := _apart(title, part, calls, method)) is not None]
            lines += [f"{title}, {words} lookahead: at most {percent(max(found))} apart."] if found else []
    return lines
