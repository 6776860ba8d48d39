"""BLEU, ROUGE, exact match and facts as a metric of Hugging Face `evaluate`, without its hub.

`evaluate.load` fetches a script for each metric; this one comes with the package and works offline. In a separate
module, since `import evaluate` takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import mean
from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import BLEU

from hf_specdec.bench.figures import quality

_ABOUT = "Corpus BLEU, and means over the examples of ROUGE F1, exact match and facts, each from 0 to 100."
_INPUTS = "predictions: list of texts; references: list of lists of texts, one or more for each prediction."


class TextMetrics(evaluate.Metric):
    """A metric whose `compute` returns `quality.MEASURES`; it keeps everything in memory, without files to lock."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"keep_in_memory": True, **settings})

    def _build_data_dir(self) -> str:
        """The path of the cache folder, which is not created: nothing is written there."""
        return self._data_dir_root

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": datasets.Sequence(text)})
        return evaluate.MetricInfo(description=_ABOUT, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        rouge = [quality.rouge(*pair) for pair in zip(predictions, references, strict=True)]
        return {
            "bleu": bleu(predictions, references),
            **{name: mean(score[name] for score in rouge) for name in quality.ROUGE},
            "exact_match": mean(map(quality.exact_match, predictions, references)),
            "facts": mean(map(quality.facts, predictions, references)),
        }


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU (Papineni et al. 2002) by sacrebleu (Post 2018), from 0 to 100.

    With its defaults: 4-grams, exponential smoothing, cased. Tokens are sacrebleu's `13a`, or characters if a
    reference holds Chinese, Japanese or Korean. A corpus without any text of four tokens scores 0 by definition: use
    exact match there.
    """
    characters = any(quality.has_cjk(text) for texts in references for text in texts)
    # sacrebleu expects the first references of all examples, then the second ones, padded with None.
    streams = [list(stream) for stream in zip_longest(*references)]
    metric = BLEU(tokenize="char" if characters else "13a", force=True)
    return float(metric.corpus_score(list(predictions), streams).score)
