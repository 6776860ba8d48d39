"""BLEU, ROUGE, exact match and facts as metrics of Hugging Face `evaluate`, without its hub.

`evaluate.load` fetches a script for each metric; these come with the package and work offline, also through
`add_batch` and `evaluate.combine`. In a separate module, since `import evaluate` takes seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import zip_longest
from statistics import mean
from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import BLEU

from hf_specdec.bench.figures import quality

# A str is a single reference, as in the hub's metrics.
References = Sequence[str] | Sequence[Sequence[str]]

_INPUTS = """
Args:
    predictions: list of texts.
    references: list of lists of texts, one or more for each prediction; or list of texts, one for each.
"""


class TextMetric(evaluate.Metric):
    """A metric of texts that keeps everything in memory, without files to lock and clean up."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"keep_in_memory": True, **settings})

    def _build_data_dir(self) -> str:
        """The path of the cache folder, which is not created: nothing is written there."""
        return self._data_dir_root

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        several = datasets.Features({"predictions": text, "references": datasets.Sequence(text)})
        single = datasets.Features({"predictions": text, "references": text})
        about = str(inspect.getdoc(type(self)))
        return evaluate.MetricInfo(
            description=about, citation="", inputs_description=_INPUTS, features=[several, single]
        )

    def _compute(self, predictions: Sequence[str], references: References) -> dict[str, float]:
        return self._score(predictions, _checked(predictions, references))

    def _score(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        raise NotImplementedError


class Bleu(TextMetric):
    """`{"bleu": 0 to 100}`: corpus BLEU (Papineni et al. 2002) by sacrebleu (Post 2018).

    With its defaults: 4-grams, exponential smoothing, cased. Tokens are sacrebleu's `13a`, or characters if a
    reference holds Chinese, Japanese or Korean. A corpus without any text of four tokens scores 0 by definition: use
    exact match there.
    """

    def _score(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        characters = any(quality.has_cjk(text) for texts in references for text in texts)
        # sacrebleu expects the first references of all examples, then the second ones, padded with None.
        streams = [list(stream) for stream in zip_longest(*references)]
        metric = BLEU(tokenize="char" if characters else "13a", force=True)
        return {"bleu": float(metric.corpus_score(list(predictions), streams).score)}


class Rouge(TextMetric):
    """`{"rouge1", "rouge2", "rougeL"}`, each 0 to 100: means over the examples of ROUGE F1 (Lin 2004)."""

    def _score(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        scores = [quality.rouge(*pair) for pair in zip(predictions, references, strict=True)]
        return {name: mean(score[name] for score in scores) for name in quality.ROUGE}


class ExactMatch(TextMetric):
    """`{"exact_match": 0 to 100}`: share of answers that equal a reference, in percent."""

    def _score(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        return {"exact_match": mean(map(quality.exact_match, predictions, references))}


class Facts(TextMetric):
    """`{"facts": 0 to 100}`: share of a reference's statements found in the answer, mean over examples."""

    def _score(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        return {"facts": mean(map(quality.facts, predictions, references))}


def combined() -> evaluate.CombinedEvaluations:
    """All metrics combined; `compute` returns `quality.MEASURES`."""
    return evaluate.combine([Bleu(), Rouge(), ExactMatch(), Facts()])


def _checked(predictions: Sequence[str], references: References) -> list[list[str]]:
    """Return the references as lists.

    Raises:
        ValueError: nothing to score, or an example without reference.
    """
    if not predictions:
        raise ValueError("predictions: empty, so there is nothing to score; give at least one answer.")
    listed = [[texts] if isinstance(texts, str) else list(texts) for texts in references]
    for place, texts in enumerate(listed):
        if not texts:
            raise ValueError(f"references[{place}]: {texts!r}; give a list of one or more texts, such as ['yes'].")
    return listed
