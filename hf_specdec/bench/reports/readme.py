"""Fills the parts of a README that quote results, between markers.

`<!-- summary PATH … -->`, `<!-- pays PATH … -->` and `<!-- picture PATH NAME -->` open a part; `<!-- /summary -->` and
so on close it. PATH is a result's path without suffix, relative to the README, or a folder of results; NAME is a
picture of it. A marker may span several lines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import Part, examples, whole
from hf_specdec.bench.models.names import short_name
from hf_specdec.bench.records import Method, Result
from hf_specdec.bench.reports.document import title_note
from hf_specdec.bench.reports.heading import processor, threads
from hf_specdec.bench.reports.markdown import number, ratio, size, table
from hf_specdec.bench.reports.trained_drafts import AFTER

_PART = re.compile(r"(<!-- (summary|pays|picture)((?:\s+[^\s>]+)*)\s+-->\n)(.*?)(<!-- /\2 -->)", re.DOTALL)
Linked = Mapping[str, Result]  # by path without suffix


def filled(text: str, folder: Path, results: Mapping[Path, Result]) -> str:
    """Fill the parts of a README from results.

    Args:
        text: the README's text.
        folder: the README's folder.
        results: by path without suffix.

    Raises:
        KeyError: a part names a missing result.
    """
    linked = {os.path.relpath(path, folder).replace(os.sep, "/"): result for path, result in results.items()}

    def part(match: re.Match[str]) -> str:
        start, kind, words, _, end = match.groups()
        return f"{start}{_PARTS[kind](linked, words.split())}\n{end}"

    return _PART.sub(part, text)


def has_parts(text: str) -> bool:
    """Whether a README has parts to fill."""
    return _PART.search(text) is not None


def _summary(linked: Linked, words: list[str]) -> str:
    """A table with a row per result: what, where, on how many examples, and the gain from drafting."""
    rows = []
    for path, result in _chosen(linked, words):
        part = whole(result)
        part = part.where(batch=part.batch_sizes[0])
        best = speed.fastest(part, speed.drafting(part))
        if best is not None:
            row = {"Task": f"[{result.settings.task}]({path}.md)", "Pair": setting(result), "Machine": machine(result)}
            row |= {"n": str(examples(part.of(best.name))), "Fastest": best.title}
            row["Gain from drafting"] = ratio(speed.over(part, best, "engine"))
            rows.append(row | {"Over assisted generation": ratio(speed.over(part, best, "assisted"))})
    return table(rows)


def _pays(linked: Linked, words: list[str]) -> str:
    """A table of when drafting pays: for each result and batch size, the fastest engine with lossless drafts."""
    rows = []
    for _, result in _chosen(linked, words):
        for batch in whole(result).batch_sizes:
            part = whole(result).where(batch=batch)
            best = speed.fastest(part, _lossless(part))
            base = None if best is None else speed.baseline(part, best, "engine")
            if best is not None and base is not None:
                rate = speed.decode_rate(part.of(base.name))
                row = {"Pair": pair_sizes(result), "Hardware": machine(result), "Batch": str(batch)}
                row |= {"n": str(examples(part.of(best.name))), "Plain tok/s": number(rate, 0)}
                rows.append(row | {"Drafting gain": ratio(speed.over(part, best, "engine"))})
    return table(rows)


def _lossless(part: Part) -> list[Method]:
    """The methods that draft without loss; of a draft that was made, the draft alone, not copies."""
    made = part.result.settings.task == "draft"
    return [one for one in speed.drafting(part) if one.kind == "speculative" and (one.name == AFTER or not made)]


def _chosen(linked: Linked, words: list[str]) -> Iterator[tuple[str, Result]]:
    """The results that are named or in named folders, in that order; all results if nothing is named."""
    for word in words or [""]:
        inside = {path: result for path, result in linked.items() if os.path.dirname(path) == word}
        yield from (linked if not word else inside or {word: linked[word]}).items()


def _picture(linked: Linked, words: list[str]) -> str:
    path, name = words
    return f"![Decoding speed, {setting(linked[path])}]({path}-{name}.png)"


def setting(result: Result) -> str:
    """The pair, the target's weights if they are not float32, and greedy or sampling."""
    names = [short_name(model.name) for model in result.models.values()]
    # A synthetic draft's name begins with its target's.
    pair = names[-1] if names[-1].startswith(f"{names[0]} (") else " + ".join(names)
    note, weights = title_note(result), _weights(result)
    how = "sampling" if result.settings.sampling else "greedy"
    return ", ".join([pair, *([f"{weights} weights"] if weights else []), how, *([note] if note else [])])


def pair_sizes(result: Result) -> str:
    """`162.8M + 13.1M, int8, synthetic`, or the target's name and `no draft`, or `own draft` if it was made from it."""
    sizes, target = " + ".join(size(model.parameters) for model in result.models.values()), result.models["target"]
    if "draft" not in result.models:
        sizes = f"{short_name(target.name)}, no draft"
    elif result.settings.task == "draft":
        sizes = f"{short_name(target.name)}, own draft"
    return ", ".join(filter(None, [sizes, _weights(result), "synthetic" if result.synthetic else ""]))


def machine(result: Result) -> str:
    """The processor and its threads, or the GPUs."""
    environment = result.environment
    if environment.gpus and not result.models["target"].device.startswith("cpu"):
        return ", ".join(environment.gpus)
    return f"{processor(environment)}, {threads(environment)}"


def _weights(result: Result) -> str:
    """The storage format of the target's weights; empty for float32."""
    kept = result.models["target"].dtype.split()[0]
    return "" if kept == "float32" else kept


_PARTS: Mapping[str, Callable[[Linked, list[str]], str]] = {
    "summary": _summary,
    "pays": _pays,
    "picture": _picture,
}
