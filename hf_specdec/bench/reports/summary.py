"""The summary of a folder of results: one row per claim, with its figure, interval, file and machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_specdec.bench.figures import alignment, quality, speed, tradeoff
from hf_specdec.bench.figures.bootstrap import Interval
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.figures.speed import batch_sizes
from hf_specdec.bench.models.known_pairs import short_name
from hf_specdec.bench.reports.best_settings import methods_of
from hf_specdec.bench.reports.heading import processor
from hf_specdec.bench.reports.markdown import capital, table
from hf_specdec.bench.reports.rendering import title_note
from hf_specdec.bench.reports.tables import llama_cpp, methods
from hf_specdec.bench.reports.tables.ablation import base_of
from hf_specdec.bench.reports.tables.benchmark import chosen_method, gains_of_trimming
from hf_specdec.bench.reports.tables.engines import DRAFTING, engines_of
from hf_specdec.bench.reports.tables.subtasks import MEASURE_TITLES


@dataclass(frozen=True)
class Claim:
    """What was measured, in words, and how much.

    Args:
        unit: × for ratios, or points.
    """

    words: str
    found: Interval
    unit: str = "×"


def summary_table(results: Mapping[str, Result]) -> str:
    """All claims of all results, by the link of each result's report.

    Where a claim is about the fastest of several settings, the setting was chosen on the calls that it is measured on.
    """
    rows = []
    for link, result in results.items():
        for claim in claims(result):
            name = short_name(link).removesuffix(".md")
            rows.append([claim.words, *_figures(claim), f"[{name}]({link})", machine(result)])
    return table(["Claim", "Figure", "95% interval", "File", "Machine"], rows)


def claims(result: Result) -> list[Claim]:
    """The claims of one result; each names its baseline, its pair and how tokens were chosen."""
    found = _CLAIMS.get(result["task"], lambda _: iter(()))(result)
    return [Claim(f"{capital(claim.words)} ({setting(result)})", claim.found, claim.unit) for claim in found]


def setting(result: Result) -> str:
    """The pair, the target's weights if they are no float32, and how tokens were chosen."""
    note, weights = title_note(result), _weights(result["models"]["target"])
    how = "sampling" if result["sampling"] else "greedy"
    return ", ".join([pair(result), *([f"{weights} weights"] if weights else []), how, *([note] if note else [])])


def pair(result: Result) -> str:
    """Names of target and draft, without folders; a synthetic draft's name begins with its target's."""
    names = [short_name(model["name"]) for model in result["models"].values()]
    return names[-1] if names[-1].startswith(f"{names[0]} (") else " + ".join(names)


def machine(result: Result) -> str:
    """Processor or GPUs, and threads."""
    environment = result["environment"]
    if environment["gpus"] and not result["models"]["target"]["device"].startswith("cpu"):
        return ", ".join(environment["gpus"])
    count = environment["torch_threads"]
    return f"{processor(environment)}, {count} thread{'s' if count > 1 else ''}"


def _figures(claim: Claim) -> list[str]:
    sign = "+" if claim.unit != "×" else ""
    digits = 2 if claim.unit == "×" else 1
    unit = "" if claim.unit == "×" else f" {claim.unit}"
    interval = "–"
    if claim.found.low is not None and claim.found.high is not None:
        interval = f"{claim.found.low:{sign}.{digits}f} to {claim.found.high:{sign}.{digits}f}"
    return [f"{claim.found.value:{sign}.{digits}f}{unit}", interval]


def _over(result: Result, method: Mapping[str, Any], words: str, *which: str, **where: Any) -> Iterator[Claim]:
    """A method's speedups over the named baselines, or over all if none is named."""
    for name in which or speed.BASELINES:
        gain = methods.over(result, method, name, **where)
        if gain is not None:
            yield Claim(f"{words} over {speed.BASELINES[name]}", gain)


def _prompts_of(result: Result) -> str:
    lengths = dict.fromkeys(str(prompt["tokens"]) for prompt in result["prompts"])
    return f"prompts of {', '.join(lengths)} tokens"


def _of_benchmark(result: Result) -> Iterator[Claim]:
    chosen, where = chosen_method(result), _prompts_of(result)
    yield from _over(result, chosen, f"{where}: {chosen['title']}")
    for words, gain in gains_of_trimming(result).items():
        yield Claim(f"{where}: {words}", gain)


def _of_engines(result: Result) -> Iterator[Claim]:
    sizes, prompts = batch_sizes(result), _prompts_of(result)
    for batch in sizes:
        where = f"batch size {batch}, {prompts}"
        for engine in engines_of(result):
            best = speed.fastest(result, batch=batch, kind=DRAFTING, engine=engine)
            if best is not None:
                baselines = speed.BASELINES if batch == sizes[0] else ("engine",)
                yield from _over(result, best, f"{where}: {best['title']},", *baselines, batch=batch)
        for decoding, own in llama_cpp.fastest_of_ours(result, batch):
            for engine in llama_cpp.engines_of(result):
                gain = llama_cpp.over(result, own, batch, engine)
                if gain is not None:
                    yield Claim(f"{where}: {own['title']}, over {engine} {decoding}", gain)


def _of_subtasks(result: Result) -> Iterator[Claim]:
    plain, prompts = methods.plain_name(result), tradeoff.prompts_of(result, None)
    where = f"{len(tradeoff.labels(result))} subtasks, {len(prompts)} examples"
    for method in [m for m in result["methods"] if m["kind"] in DRAFTING]:
        yield from _over(result, method, f"{where}: {method['title']}")
    for method in [m for m in result["methods"] if m["kind"] == "bild"]:
        for name in tradeoff.JUDGED:
            change = quality.difference(result, method["name"], plain, name, prompts)
            if change is not None:
                words = f"{where}: {MEASURE_TITLES[name]} of {method['title']} − plain generate()"
                yield Claim(words, change, "points")
    if {"bild", "speculative"} <= {method["name"] for method in result["methods"]}:
        gain = speed.speedup(result, "bild", "speculative")
        if gain is not None:
            yield Claim(f"{where}: BiLD over speculative decoding", gain)


def _of_sweep(result: Result) -> Iterator[Claim]:
    for strategy in DRAFTING:
        rows = methods_of(result, strategy)
        best = speed.fastest_of(result, rows)
        if best is not None:
            yield from _over(result, best, f"fastest of {len(rows)} settings: {best['title']},", "engine")


def _of_ablation(result: Result) -> Iterator[Claim]:
    for method in [m for m in result["methods"] if m["kind"] in DRAFTING]:
        base = base_of(result, method, "none")
        gain = None if base is None else speed.speedup(result, method["name"], base)
        if gain is not None:
            yield Claim(f"{method['title']}, over {speed.BASELINES['engine']}", gain)


def _of_align(result: Result) -> Iterator[Claim]:
    gain = alignment.acceptance_gain(result)
    if gain is not None:
        yield Claim("acceptance on held-out prompts, aligned draft − draft as it was", gain, "points")


_CLAIMS: Mapping[str, Callable[[Result], Iterator[Claim]]] = {
    "benchmark": _of_benchmark,
    "engines": _of_engines,
    "subtasks": _of_subtasks,
    "sweep": _of_sweep,
    "ablation": _of_ablation,
    "align": _of_align,
}


def engine_rows(results: Mapping[str, Result]) -> str:
    """When drafting pays: the fastest setting of each engine and batch size, by target, device and batch."""
    listed = {link: result for link, result in results.items() if result["task"] == "engines"}
    engines = list(dict.fromkeys(engine for result in listed.values() for engine in engines_of(result)))
    header = ["Target + draft", "Device", "Tokens chosen by", "Batch size", "Plain generate() (tokens/s)"]
    for engine in engines:
        header += [f"Plain, {engine} (tokens/s)", f"Draft over plain, {engine}"]
    rows = [
        row
        for link, result in listed.items()
        for batch in batch_sizes(result)
        if (row := _engine_row(result, batch, link, engines))
    ]
    return table([*header, "Fastest over plain generate()"], rows)


def _engine_row(result: Result, batch: int, link: str, engines: Sequence[str]) -> list[str]:
    sizes = " + ".join(f"{_size(m['parameters'])} {_weights(m)}".strip() for m in result["models"].values())
    note = title_note(result)
    cells = [f"{sizes} ({note})" if note else sizes, f"[{machine(result)}]({link})"]
    cells += ["sampling" if result["sampling"] else "greedy", str(batch), _fastest_rate(result, batch, kind="plain")]
    for engine in engines:
        best = speed.fastest(result, batch=batch, kind=DRAFTING, engine=engine)
        gain = None if best is None else methods.over(result, best, "engine", batch=batch)
        cells += [_fastest_rate(result, batch, kind="none", engine=engine), _gain(gain)]
    best = speed.fastest(result, batch=batch, kind=DRAFTING)
    return [*cells, _gain(None if best is None else methods.over(result, best, "plain", batch=batch))]


def _fastest_rate(result: Result, batch: int, **facts: Any) -> str:
    """Tokens per second of the fastest method with these facts, which is what speedups are over."""
    method = speed.fastest(result, batch=batch, **facts)
    rate = None if method is None else speed.decode_rate(speed.calls_of(result, method["name"], batch=batch))
    return "–" if rate is None else f"{rate:.1f}"


def _gain(found: speed.Ratio | None) -> str:
    if found is None:
        return "–"
    ends = "" if found.low is None else f" ({found.low:.2f}–{found.high:.2f})"
    return f"{found.value:.2f}{ends}"


def _weights(model: Mapping[str, Any]) -> str:
    """What a model's weights are kept in, empty for float32."""
    kept = str(model["dtype"].split()[0])
    return "" if kept == "float32" else kept


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
