"""This package's engines beside llama.cpp on the same weights: a table of the task engines."""

from __future__ import annotations

from collections.abc import Iterator

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import Ratio
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.reports.markdown import number, ratio, table

LEGEND = (
    "Speedups of our loop over llama.cpp, each in the best of its draft settings: the same models, prompts, number of "
    "threads and count of tokens, greedy. bf16 and q8_0 (8 bits a weight) say how llama.cpp stores the weights that "
    "ours have in the dtype named above."
)
WIDE_HEAD = " The output head of our int8 models keeps its dtype, while q8_0 stores it in 8 bits."


def legend(result: Result) -> str:
    """What the table shows. Synthetic models have a quantized head, models that transformers quantizes do not."""
    target = result["models"]["target"]
    return LEGEND + (WIDE_HEAD if target["dtype"].startswith("int8") and not target.get("synthetic") else "")


def engines_of(result: Result) -> list[str]:
    """llama.cpp's engines, in the order in which they ran."""
    return list(dict.fromkeys(m["engine"] for m in result["methods"] if m["kind"] == "llama.cpp"))


def table_over_llama_cpp(result: Result) -> str:
    """One row per batch size and engine of this package, plain and with the draft."""
    theirs = engines_of(result)
    header = ["Batch size", "Engine", "Decoding", "Tokens/Sec", *(f"Speedup over {engine}" for engine in theirs)]
    rows = []
    for batch in speed.batch_sizes(result):
        for decoding, own in fastest_of_ours(result, batch):
            rate = speed.decode_rate(speed.calls_of(result, own["name"], batch=batch))
            cells = [str(batch), own["engine"], decoding, number(rate, 1)]
            rows.append([*cells, *(ratio(over(result, own, batch, engine)) for engine in theirs)])
    return table(header, rows)


def fastest_of_ours(result: Result, batch: int) -> Iterator[tuple[str, MethodDict]]:
    """This package's fastest methods, plain and with the draft on each engine, and how they decode."""
    for engine in dict.fromkeys(m["engine"] for m in result["methods"] if m["kind"] == "none"):
        for decoding, kind in (("plain", "none"), ("with a draft", ("speculative", "bild"))):
            own = speed.fastest(result, batch=batch, kind=kind, engine=engine)
            if own is not None:
                yield decoding, own


def over(result: Result, own: MethodDict, batch: int, engine: str) -> Ratio | None:
    """A method's speedup over llama.cpp, which drafts if the method does."""
    role = "plain" if own["kind"] == "none" else "fixed"
    best = speed.fastest(result, batch=batch, kind="llama.cpp", engine=engine, role=role)
    return None if best is None else speed.speedup(result, own["name"], best["name"], batch=batch)
