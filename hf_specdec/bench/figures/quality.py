"""How good answers are: scores of single examples, and their paired differences between two methods.

All scores run from 0 to 100, as published tables have them. Corpus figures (BLEU, means) come from the `evaluate`
metrics of `text_metrics`, which compute by the functions here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from hf_specdec.bench.figures.bootstrap import Interval, interval
from hf_specdec.bench.figures.speed import Result, by_question, calls_of

ROUGE = ("rouge1", "rouge2", "rougeL")
MEASURES = ("bleu", *ROUGE, "exact_match", "facts")

# Kana, ideographs and Hangul: no spaces between words, or (Hangul) letters that rouge_score drops.
_CJK = "\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0002ffff"
_CJK_TEXT = re.compile(f"[{_CJK}]")
_CJK_TOKEN = re.compile(f"[{_CJK}]|[a-z0-9]+")
# Between the statements of a text: punctuation before a blank or the end, and "and".
_BETWEEN_FACTS = re.compile(r"[.,;:!?](?:\s+|$)|[。、！？]|\s+and\s+")


def has_cjk(text: str) -> bool:
    """Whether a text holds Chinese, Japanese or Korean."""
    return _CJK_TEXT.search(text) is not None


def rouge(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L F1 (Lin 2004) of one answer, by rouge_score, unstemmed; the best reference counts.

    Tokens are rouge_score's, lower-case words of a-z and 0-9. Examples with a reference in Chinese, Japanese or
    Korean, which it would drop, are split into characters there. Two empty texts score 0.
    """
    return dict(_rouge(prediction, tuple(references)))


@lru_cache(maxsize=100_000)  # reports ask for the same answers again and again
def _rouge(prediction: str, references: tuple[str, ...]) -> Mapping[str, float]:
    from rouge_score.rouge_scorer import RougeScorer  # here, since runs without quality do without it

    scorer = RougeScorer(ROUGE, tokenizer=_CharacterTokenizer() if any(map(has_cjk, references)) else None)
    return {name: 100 * score.fmeasure for name, score in scorer.score_multi(references, prediction).items()}


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """100 for an answer that equals one of its references, apart from blanks around them; 0 otherwise."""
    return 100.0 * (prediction.strip() in [text.strip() for text in references])


def facts(prediction: str, references: Sequence[str]) -> float:
    """Share, in percent, of a reference's statements that stand word for word in the answer; the best reference counts.

    Statements are what stands between punctuation marks and "and": where exact match is all or nothing, one wrong
    word costs one of them.
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


# What can be said of one example. BLEU is a figure of a whole corpus.
OF_ONE: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "rougeL": lambda prediction, references: rouge(prediction, references)["rougeL"],
    "exact_match": exact_match,
    "facts": facts,
}


def answers(result: Result, method: str, prompts: Iterable[int] | None = None) -> dict[int, tuple[str, Sequence[str]]]:
    """(answer, references) of each prompt that has references; answers are those of the first repeat."""
    references = {prompt["index"]: prompt.get("references") for prompt in result["prompts"]}
    wanted = references.keys() if prompts is None else set(prompts)
    return {
        index: (text, references[index])
        for call in calls_of(result, method, repeat=0)
        for index, text in zip(call.prompts, call.texts or (), strict=False)
        if references[index] and index in wanted
    }


def per_example(result: Result, method: str, measure: str, prompts: Iterable[int] | None = None) -> dict[int, float]:
    """A measure of `OF_ONE` by prompt."""
    return {index: OF_ONE[measure](*pair) for index, pair in answers(result, method, prompts).items()}


def difference(
    result: Result,
    method: str,
    base: str,
    measure: str,
    prompts: Iterable[int] | None = None,
    *,
    deciding: bool = False,
) -> Interval | None:
    """Mean over examples of a method's score minus another's, in points, with its 95% paired bootstrap interval.

    `deciding`: see `interval`. None where they have no judged example in common.
    """
    listed = None if prompts is None else list(prompts)
    ours, theirs = (per_example(result, name, measure, listed) for name in (method, base))
    judged = {(index,): {0: (ours[index] - theirs[index], 1.0)} for index in sorted(ours.keys() & theirs.keys())}
    return interval(by_question(result, judged), lambda total, count: total / count, deciding=deciding)


class _CharacterTokenizer:
    """For rouge_score: each ideograph, kana or Hangul syllable, and words of a-z and 0-9 between them."""

    def tokenize(self, text: str) -> list[str]:
        return _CJK_TOKEN.findall(text.lower())


def scores(result: Result) -> list[dict[str, Any]]:
    """One entry per method and subtask, and one for all (subtask None): `MEASURES` and the number of `examples`.

    Only questions with references count; without any the list is empty.
    """
    if not any(prompt.get("references") for prompt in result["prompts"]):
        return []
    # Here because it takes seconds.
    from hf_specdec.bench.figures.text_metrics import combined

    labels = {prompt["index"]: prompt["label"] for prompt in result["prompts"]}
    found = []
    for method in result["methods"]:
        texts = answers(result, method["name"])
        for subtask in [None, *dict.fromkeys(labels[index] for index in texts)]:
            chosen = [pair for index, pair in texts.items() if subtask in (None, labels[index])]
            if not chosen:
                continue
            predictions, references = ([pair[side] for pair in chosen] for side in (0, 1))
            measured = combined().compute(predictions=predictions, references=references)
            entry = {"method": method["name"], "subtask": subtask, "examples": len(chosen)}
            found.append(entry | {name: round(measured[name], 6) for name in MEASURES})
    return found
