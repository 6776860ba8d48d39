"""Quality of answers: BLEU, ROUGE and exact match against references, and where two outputs part, by how much.

Scores run from 0 to 100, as published tables have them. The same functions stand behind the `evaluate.Metric`
classes of `bench.figures.evaluate_metrics`; this module spares a run the seconds that `import evaluate` takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU
from torch import Tensor
from transformers import PreTrainedModel

ROUGE = ("rouge1", "rouge2", "rougeL")

# Kana, ideographs and Hangul: no spaces between words, or (Hangul) letters that rouge_score drops.
_CJK = "\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0002ffff"
_CJK_TEXT = re.compile(f"[{_CJK}]")
_CJK_TOKEN = re.compile(f"[{_CJK}]|[a-z0-9]+")


def quality(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """All scores of one method's answers.

    Args:
        predictions: one answer an example.
        references: one or more good answers an example; the best one counts (in BLEU: all at once).

    Returns:
        `bleu`, `rouge1`, `rouge2`, `rougeL`, `exact_match`, each from 0 to 100.

    Raises:
        ValueError: nothing to score, or an example without reference.
    """
    exact = exact_match(predictions, references)
    return {"bleu": bleu(predictions, references), **rouge(predictions, references), "exact_match": exact}


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU (Papineni et al. 2002) by sacrebleu, its defaults: 4-grams, exponential smoothing, cased.

    Tokens are sacrebleu's `13a`; characters, where a reference holds Chinese, Japanese or Korean. A corpus without
    any text of four tokens scores 0 by definition: read exact match there.

    Raises:
        ValueError: as `quality`.
    """
    _check(predictions, references)
    characters = any(_CJK_TEXT.search(text) for texts in references for text in texts)
    # sacrebleu takes the first references of all examples, then the second ones; None where there are fewer.
    most = max(len(texts) for texts in references)
    streams: list[list[Any]] = [[texts[i] if i < len(texts) else None for texts in references] for i in range(most)]
    metric = BLEU(tokenize="char" if characters else "13a", force=True)
    return float(metric.corpus_score(list(predictions), streams).score)


def rouge(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L F1 (Lin 2004) by rouge_score, unstemmed: means over the examples.

    Tokens are rouge_score's, lower-case words of a-z and 0-9. Examples with a reference in Chinese, Japanese or
    Korean, which it would drop, are split into characters there. Two empty texts score 0.

    Raises:
        ValueError: as `quality`.
    """
    _check(predictions, references)
    words, characters = RougeScorer(ROUGE), RougeScorer(ROUGE, tokenizer=_CharacterTokenizer())
    scores = []
    for prediction, texts in zip(predictions, references, strict=True):
        scorer = characters if any(_CJK_TEXT.search(text) for text in texts) else words
        scores.append(scorer.score_multi(texts, prediction))
    return {name: 100 * mean(score[name].fmeasure for score in scores) for name in ROUGE}


def exact_match(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Share of answers, in percent, that equal one of their references, blanks around both left out.

    Raises:
        ValueError: as `quality`.
    """
    _check(predictions, references)
    hits = [
        prediction.strip() in [text.strip() for text in texts]
        for prediction, texts in zip(predictions, references, strict=True)
    ]
    return 100 * mean(hits)


class _CharacterTokenizer:
    """For rouge_score: each ideograph, kana or Hangul syllable, and words of a-z and 0-9 between them."""

    def tokenize(self, text: str) -> list[str]:
        return _CJK_TOKEN.findall(text.lower())


def _check(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if not predictions:
        raise ValueError("predictions: empty, so there is nothing to score; give at least one answer.")
    if len(predictions) != len(references):
        raise ValueError(
            f"references: {len(references)} for {len(predictions)} predictions; give one list of references for each."
        )
    for i, texts in enumerate(references):
        if isinstance(texts, str) or not texts:
            raise ValueError(f"references[{i}]: {texts!r}; give a list of one or more texts, such as ['yes'].")


@dataclass(frozen=True)
class Divergence:
    """Where two outputs for the same prompt part, and how sure the model was there.

    Args:
        position: index of the first new token that differs.
        margin: the model's largest logit minus its second one there, after all that the outputs share. As a
            difference of logits it is one of log-probabilities too, in nats.
        gap: |logit of one output's token − logit of the other's|; None where one output just ends earlier. A gap
            well above the margin means that one of the two tokens was no near-tie.
    """

    position: int
    margin: float
    gap: float | None


def first_divergence(tokens: Sequence[int], reference_tokens: Sequence[int]) -> int | None:
    """Index of the first token that differs; an output that ends earlier differs at its end. None where equal."""
    for i, (token, reference) in enumerate(zip(tokens, reference_tokens, strict=False)):
        if token != reference:
            return i
    shorter, longer = sorted((len(tokens), len(reference_tokens)))
    return None if shorter == longer else shorter


def divergence(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], tokens: Sequence[int], reference_tokens: Sequence[int]
) -> Divergence | None:
    """The first divergence of two outputs and what the model makes of it, in one pass; None where they are equal.

    Args:
        model: the target.
        inputs: what `generate` was given, of one row: `input_ids` `[1, P]`, and `attention_mask` if padded.
        tokens, reference_tokens: new tokens only, without the prompt.
    """
    position = first_divergence(tokens, reference_tokens)
    if position is None:
        return None
    logits = next_logits(model, inputs, reference_tokens[:position])
    top = logits.topk(2).values
    gap = None
    if position < min(len(tokens), len(reference_tokens)):
        gap = float((logits[tokens[position]] - logits[reference_tokens[position]]).abs())
    return Divergence(position, float(top[0] - top[1]), gap)


@torch.no_grad()
def next_logits(model: PreTrainedModel, inputs: Mapping[str, Tensor], new_tokens: Sequence[int]) -> Tensor:
    """Float32 logits `[V]` for the token after `new_tokens`, from one pass over all, before any processor.

    Left padding is taken out first, so that no model needs to be told positions; an encoder keeps its padding.

    Args:
        inputs: as in `divergence`.

    Raises:
        ValueError: more than one row.
    """
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if len(ids) != 1:
        raise ValueError(f"input_ids: {len(ids)} rows; give the one row whose output diverged, input_ids[i : i + 1].")
    new = ids.new_tensor([list(new_tokens)])
    passed: dict[str, Any]
    if model.config.is_encoder_decoder:
        starts = model.generation_config.decoder_start_token_id
        start = model.config.decoder_start_token_id if starts is None else starts
        passed = {"input_ids": ids, "decoder_input_ids": torch.cat([new.new_full((1, 1), start), new], dim=1)}
        passed |= {} if mask is None else {"attention_mask": mask}
    else:
        ids = ids if mask is None else ids[:, mask[0].bool()]
        passed = {"input_ids": torch.cat([ids, new], dim=1)}
    return model(**passed, use_cache=False, return_dict=True).logits[0, -1].float()
