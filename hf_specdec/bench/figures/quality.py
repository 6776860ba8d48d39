"""How good answers are: scores of single examples, and their paired differences between two methods.

All scores run from 0 to 100, as in published tables. Corpus figures (BLEU, means) come from the `evaluate` metric of
`text_metrics`, which calls the functions here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import ONE_SIDED, interval, lower_bound
from hf_specdec.bench.figures.frames import Part, whole
from hf_specdec.bench.records import Interval, Method, Result, Score
from hf_specdec.config import LOSSY_STRATEGIES

ROUGE = ("rouge1", "rouge2", "rougeL")
MEASURES = ("bleu", *ROUGE, "exact_match", "facts")
# Each can fall alone: an answer may become wrong by one word, or be wrong already and get worse.
JUDGED = ("rougeL", "exact_match", "facts")
MOST_LOSS = 1.0  # points
SCORE = "facts"  # the subtask's score: defined for free answers as well as for short ones
_LOSSLESS = ("plain", "none", "assisted", "speculative")
_WORST = -100.0  # points: the most that a question can lose
_ROUNDING = 1e-9  # points

# Kana, ideographs and Hangul: no spaces between words, or (Hangul) letters that rouge_score drops.
_CJK = "\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0002ffff"
_CJK_TEXT = re.compile(f"[{_CJK}]")
_CJK_TOKEN = re.compile(f"[{_CJK}]|[a-z0-9]+")
# Separates the statements of a text: punctuation before a blank or the end, and "and".
_BETWEEN_FACTS = re.compile(r"[.,;:!?](?:\s+|$)|[。、！？]|\s+and\s+")


@dataclass(frozen=True)
class Difference(Interval):
    """A mean difference in quality, in points, with its 95% interval by a paired bootstrap.

    Args:
        bound: the lower bound that verdicts use, by `lower_bound`; it allows for losses too rare to show in the sample.
        worse: number of answers that score lower.
    """

    bound: float = _WORST
    worse: int = 0

    def excludes(self, loss: float) -> bool:
        """Whether a loss of more than `loss` points is excluded."""
        return self.bound >= -loss


def questions_needed(loss: float) -> float:
    """The number of questions that exclude a loss of more than `loss` points if no answer changes; infinite for 0.

    With none of n questions worse, their share is at most 1 - 0.025^(1/n) (Clopper and Pearson), and each can lose 100.
    """
    if loss <= 0:
        return math.inf
    if loss >= -_WORST:
        return 1
    return math.ceil(math.log(ONE_SIDED) / math.log(1 + loss / _WORST))


def has_cjk(text: str) -> bool:
    """Whether a text holds Chinese, Japanese or Korean."""
    return _CJK_TEXT.search(text) is not None


def rouge(prediction: str, references: Sequence[str]) -> Mapping[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L F1 (Lin 2004) of one answer, by rouge_score, unstemmed; the best reference counts.

    Tokens are rouge_score's, lower-case words of a-z and 0-9. Examples with a reference in Chinese, Japanese or
    Korean, which it would drop, are split into characters there. Two empty texts score 0.
    """
    return _rouge(prediction, tuple(references))


@lru_cache(maxsize=100_000)  # reports score the same answers many times
def _rouge(prediction: str, references: tuple[str, ...]) -> Mapping[str, float]:
    from rouge_score.rouge_scorer import RougeScorer  # imported here, since runs without quality don't need it

    scorer = RougeScorer(ROUGE, tokenizer=_CharacterTokenizer() if any(map(has_cjk, references)) else None)
    return {name: 100 * score.fmeasure for name, score in scorer.score_multi(references, prediction).items()}


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """100 for an answer that equals one of its references, ignoring blanks around them; 0 otherwise."""
    return 100.0 * (prediction.strip() in [text.strip() for text in references])


def facts(prediction: str, references: Sequence[str]) -> float:
    """Share, in percent, of a reference's statements found word for word in the answer; the best reference counts.

    Punctuation marks and "and" separate statements. Exact match is all or nothing; here one wrong word costs one
    statement.
    """
    return _facts(prediction, tuple(references))


@lru_cache(maxsize=100_000)
def _facts(prediction: str, references: tuple[str, ...]) -> float:
    said = " ".join(prediction.split())
    shares = []
    for text in references:
        wanted = [" ".join(part.split()) for part in _BETWEEN_FACTS.split(text) if part.strip()]
        hits = [re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", said) is not None for fact in wanted]
        shares.append(sum(hits) / len(hits) if hits else float(not said))
    return 100 * max(shares)


# Measures of a single example; BLEU is a figure of a whole corpus.
OF_ONE: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "rougeL": lambda prediction, references: rouge(prediction, references)["rougeL"],
    "exact_match": exact_match,
    "facts": facts,
}


def answers(part: Part, method: str) -> dict[int, tuple[str, Sequence[str]]]:
    """(answer, references) of each prompt that has references; answers are from the first repeat."""
    references = {one.index: one.references for one in part.result.prompts if one.references}
    calls = part.where(repeat=0).of(method)
    return {
        index: (text, references[index])
        for call in calls[calls["texts"].notna()].itertuples()
        for index, text in zip(call.indexes, call.texts, strict=True)
        if index in references
    }


def per_example(part: Part, method: str, measure: str) -> dict[int, float]:
    """The scores by a measure of `OF_ONE`, by prompt."""
    return {index: OF_ONE[measure](*pair) for index, pair in answers(part, method).items()}


def difference(part: Part, method: str, base: str, measure: str) -> Difference | None:
    """Mean over examples of a method's score minus another's; None if they have no judged example in common."""
    ours, theirs = (per_example(part, name, measure) for name in (method, base))
    return of_differences(part, {index: ours[index] - theirs[index] for index in ours.keys() & theirs.keys()})


def of_differences(part: Part, points: Mapping[int, float]) -> Difference | None:
    """The mean of paired differences by prompt, or None; the turns of a dialogue are one question."""
    questions: dict[int, list[float]] = {}
    for one in part.result.prompts:
        if one.index in points:
            sums = questions.setdefault(one.question, [0.0, 0.0])
            sums[:] = sums[0] + points[one.index], sums[1] + 1
    cells = [[tuple(sums)] for sums in questions.values()]
    found = interval(cells, lambda total, count: total / count)
    if found is None:
        return None
    worse = sum(one < -_ROUNDING for one in points.values())
    return Difference(found.value, found.low, found.high, lower_bound(cells, _WORST), worse)


def worst_difference(part: Part, method: str, plain: str) -> Difference | None:
    """A method's score minus plain decoding's, in points, by the measure of `JUDGED` whose bound is lowest.

    Without references, greedy answers are compared with plain decoding's own, by ROUGE-L.

    Returns:
        None if quality is unknown: no example in common, or sampled answers without references.
    """
    result = part.result
    if any(one.references for one in result.prompts):
        found = [difference(part, method, plain, measure) for measure in JUDGED]
    elif result.settings.sampling:
        return None
    else:
        calls = part.where(repeat=0).of(plain)
        texts = {i: (text,) for one in calls.itertuples() for i, text in zip(one.indexes, one.texts, strict=True)}
        prompts = [replace(one, references=texts.get(one.index, ())) for one in result.prompts]
        found = [difference(Part(replace(result, prompts=prompts), part.calls), method, plain, "rougeL")]
    return min((one for one in found if one is not None), key=lambda one: one.bound, default=None)


def change(part: Part, method: str) -> Difference | None:
    """Mean over examples of a method's `SCORE` minus the lossless methods'.

    The lossless methods' scores are averaged: in sampling each is a separate draw from the same distribution.
    None without references.
    """
    lossless = [one.name for one in part.methods if one.kind in _LOSSLESS and one.name != method]
    bases = [per_example(part, name, SCORE) for name in lossless]
    points = {}
    for index, score in per_example(part, method, SCORE).items():
        if theirs := [base[index] for base in bases if index in base]:
            points[index] = score - sum(theirs) / len(theirs)
    return of_differences(part, points)


@dataclass(frozen=True)
class Verdict:
    """The verdict on BiLD for some examples.

    Args:
        speed: decode tokens/s of BiLD / of speculative decoding; None without rates.
        differences: BiLD's score minus plain decoding's, in points, for each of `JUDGED`; None without references.
    """

    speed: Interval | None
    differences: Mapping[str, Difference] | None

    @property
    def known(self) -> bool:
        """Whether there are rates and references for a verdict."""
        return self.speed is not None and self.differences is not None

    @property
    def faster(self) -> bool:
        """Whether the interval of the speed lies above 1."""
        return self.speed is not None and self.speed.faster

    @property
    def as_good(self) -> bool:
        """Whether every measure excludes a loss of more than `MOST_LOSS` points."""
        return self.differences is not None and all(one.excludes(MOST_LOSS) for one in self.differences.values())

    @property
    def none_worse(self) -> bool:
        """Whether no answer of these examples is worse by any measure; other examples may still lose."""
        return self.differences is not None and not any(one.worse for one in self.differences.values())

    @property
    def won(self) -> bool:
        """Whether BiLD is faster, and no answer is worse or a loss is excluded."""
        return self.faster and (self.as_good or self.none_worse)

    @property
    def words(self) -> str:
        """The answer to the question whether BiLD is faster at no loss of quality."""
        if self.differences is None:
            return "no references"
        if self.speed is None:
            return "no rates"
        if self.faster:
            if self.as_good:
                return "yes"
            return "open: no answer worse" if self.none_worse else "no: loss not excluded"
        return "no: not faster" if self.as_good or self.none_worse else "no: neither"


def verdict(part: Part, bild: str, speculative: str) -> Verdict:
    """The verdict on the methods with these names."""
    found = {name: difference(part, bild, "plain", name) for name in JUDGED}
    differences = {name: value for name, value in found.items() if value is not None}
    return Verdict(speed.speedup(part, bild, speculative), differences or None)


def won(part: Part, bild: str, speculative: str) -> int | None:
    """The number of subtasks on which BiLD is faster with quality kept; None if quality is unknown."""
    found = [verdict(part.where(label=label), bild, speculative) for label in part.labels]
    return None if all(one.differences is None for one in found) else sum(one.won for one in found)


def lossy_methods(part: Part) -> list[Method]:
    """The methods of this package that may lose quality."""
    return [method for method in part.methods if method.kind in LOSSY_STRATEGIES and method.ours]


def lossless_reference(part: Part, method: Method) -> Method | None:
    """Speculative decoding with a lossy method's draft and engine, at its own fastest lookahead; None without any."""

    def alike(one: Method) -> tuple[object, ...]:
        shared = ("verification", "drafter", "entropy_threshold")
        return (one.draft, one.engine, *(one.keywords.get(name) for name in shared))

    return speed.fastest(
        part, [one for one in part.methods if one.kind == "speculative" and alike(one) == alike(method)]
    )


class _CharacterTokenizer:
    """A tokenizer for rouge_score: each ideograph, kana or Hangul syllable, and words of a-z and 0-9 between them."""

    def tokenize(self, text: str) -> list[str]:
        return _CJK_TOKEN.findall(text.lower())


def scores(result: Result) -> list[Score]:
    """A `Score` per method and subtask, and one for all subtasks; only questions with references count."""
    if not any(one.references for one in result.prompts):
        return []
    # Imported here since it takes seconds.
    from hf_specdec.bench.figures.text_metrics import TextMetrics

    part, metrics = whole(result), TextMetrics()
    found = []
    for method in part.methods:
        for subtask in (None, *part.labels):
            chosen = list(answers(part.where(label=subtask), method.name).values())
            if chosen:
                predictions, references = ([pair[side] for pair in chosen] for side in (0, 1))
                measured = metrics.compute(predictions=predictions, references=references)
                figures = {name: round(measured[name], 6) for name in MEASURES}
                found.append(Score(method.name, subtask, len(chosen), **figures))
    return found
