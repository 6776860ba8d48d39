"""BLEU, ROUGE and exact match as metrics of Hugging Face `evaluate`, without its hub.

`evaluate.load` fetches a script for each metric; these come with the package and work offline, also through
`add_batch` and `evaluate.combine`. They compute by the functions of `hf_specdec.bench.figures.quality`. A module of its
own, since `import evaluate` takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_specdec.bench.figures import quality

# A str stands for one reference, as in the hub's metrics.
References = Sequence[str] | Sequence[Sequence[str]]

_INPUTS = """
Args:
    predictions: list of texts.
    references: list of lists of texts, one or more for each prediction; or list of texts, one for each.
"""


class _TextMetric(evaluate.Metric):
    """A metric of texts, kept in memory: no files that would have to be locked and cleaned up."""

    description = ""
    citation = ""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"keep_in_memory": True, **settings})

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        several = datasets.Features({"predictions": text, "references": datasets.Sequence(text)})
        single = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(
            description=self.description,
            citation=self.citation,
            inputs_description=_INPUTS,
            features=[several, single],
        )


class Bleu(_TextMetric):
    """`{"bleu": 0 to 100}`; see `quality.bleu`."""

    description = "Corpus BLEU by sacrebleu, from 0 to 100."
    citation = "Papineni et al. 2002; Post 2018"

    def _compute(self, predictions: Sequence[str], references: References) -> dict[str, float]:
        return {"bleu": quality.bleu(predictions, _lists(references))}


class Rouge(_TextMetric):
    """`{"rouge1", "rouge2", "rougeL"}`, each 0 to 100; see `quality.rouge`."""

    description = "ROUGE-1, ROUGE-2 and ROUGE-L F1 by rouge_score, from 0 to 100."
    citation = "Lin 2004"

    def _compute(self, predictions: Sequence[str], references: References) -> dict[str, float]:
        return quality.rouge(predictions, _lists(references))


class ExactMatch(_TextMetric):
    """`{"exact_match": 0 to 100}`; see `quality.exact_match`."""

    description = "Share of answers that equal a reference, in percent."

    def _compute(self, predictions: Sequence[str], references: References) -> dict[str, float]:
        return {"exact_match": quality.exact_match(predictions, _lists(references))}


def combined() -> evaluate.CombinedEvaluations:
    """All three; its `compute` returns what `quality.quality` does."""
    return evaluate.combine([Bleu(), Rouge(), ExactMatch()])


def _lists(references: References) -> list[list[str]]:
    return [[texts] if isinstance(texts, str) else list(texts) for texts in references]
