"""Scores against hand-computed values and the libraries' own functions; divergences against generate's logits."""

from __future__ import annotations

from statistics import mean

import evaluate
import pytest
import sacrebleu
import torch
from helpers import families
from rouge_score.rouge_scorer import RougeScorer

from hf_specdec.bench.figures import evaluate_metrics
from hf_specdec.bench.figures.quality import (
    bleu,
    divergence,
    exact_match,
    first_divergence,
    next_logits,
    quality,
    rouge,
)

PREDICTIONS = ["the cat sat on the mat", "", "Yes.", "the the the the", " a b c d e "]
REFERENCES = [
    ["the cat is on the mat", "there is a cat on the mat"],
    ["silence"],
    ["No.", "Yes."],
    ["the cat", "a dog", "the bird"],
    ["a b c d e"],
]


def test_bleu_by_hand() -> None:
    # 5 of 6 words, 3 of 5 pairs, 1 of 4 triples; no quadruple of 3, which exponential smoothing counts as half a one.
    by_hand = 100 * (5 / 6 * 3 / 5 * 1 / 4 * (1 / 2) / 3) ** (1 / 4)
    assert bleu(["the cat sat on the mat"], [["the cat is on the mat"]]) == pytest.approx(by_hand)
    # All n-grams are right; two words of six are missing: the brevity penalty is exp(1 - 6/4).
    assert bleu(["the cat sat on"], [["the cat sat on the mat"]]) == pytest.approx(100 * 2.718281828459045**-0.5)


def test_bleu_is_a_corpus_figure_and_takes_several_references() -> None:
    one, other = ("a b c d", "a b c d"), ("e f g h", "e f g x")
    together = bleu([one[0], other[0]], [[one[1]], [other[1]]])
    # 7 of 8, 5 of 6, 3 of 4, 1 of 2: sums over the corpus, not a mean of two scores.
    assert together == pytest.approx(100 * (7 / 8 * 5 / 6 * 3 / 4 * 1 / 2) ** (1 / 4))
    assert bleu([other[0]], [["x", "e f g h"]]) == pytest.approx(100)
    assert bleu([other[0]], [["x"]]) < 1


def test_bleu_of_texts_below_four_tokens_is_0_and_exact_match_says_more() -> None:
    assert bleu(["yes"], [["yes"]]) == 0
    assert exact_match(["yes"], [["yes"]]) == 100


def test_rouge_by_hand() -> None:
    # 2 words shared of 3 and 4, 1 pair of 2 and 3; the longest common subsequence has 2 words.
    scores = rouge(["The cat, sat"], [["the cat ran fast"]])
    assert scores == pytest.approx({"rouge1": 400 / 7, "rouge2": 40.0, "rougeL": 400 / 7})
    # Of several references the best counts, for each figure by itself.
    scores = rouge(["b a c d"], [["a b c d", "x b a y"]])
    assert scores == pytest.approx({"rouge1": 100.0, "rouge2": 100 / 3, "rougeL": 75.0})


def test_exact_match_by_hand() -> None:
    assert exact_match(PREDICTIONS, REFERENCES) == 40
    assert exact_match(["", "Yes"], [[""], ["yes"]]) == 50


def test_scores_are_those_of_the_libraries() -> None:
    padded = [[*texts, None, None][:3] for texts in REFERENCES]
    streams = [list(stream) for stream in zip(*padded, strict=True)]
    assert bleu(PREDICTIONS, REFERENCES) == sacrebleu.corpus_bleu(PREDICTIONS, streams, force=True).score
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    pairs = list(zip(REFERENCES, PREDICTIONS, strict=True))
    for name, score in rouge(PREDICTIONS, REFERENCES).items():
        best = [max(scorer.score(text, answer)[name].fmeasure for text in texts) for texts, answer in pairs]
        assert score == pytest.approx(100 * mean(best))


def test_empty_answers_score_0_and_break_nothing() -> None:
    assert quality([""], [["a b c d e"]]) == dict.fromkeys(("bleu", "rouge1", "rouge2", "rougeL", "exact_match"), 0)
    assert quality([""], [[""]]) == {"bleu": 0, "rouge1": 0, "rouge2": 0, "rougeL": 0, "exact_match": 100}


def test_text_without_spaces_is_compared_by_characters() -> None:
    # 5 characters of 6 are shared, in order, and 3 pairs of 5.
    scores = rouge(["東京は晴です"], [["東京は雨です"]])
    assert scores == pytest.approx({"rouge1": 500 / 6, "rouge2": 60.0, "rougeL": 500 / 6})
    assert 0 < bleu(["今日東京は晴れです"], [["今日東京は雨です"]]) < 100
    assert RougeScorer(["rouge1"]).score("東京は雨です", "東京は雨です")["rouge1"].fmeasure == 0, "the control"


@pytest.mark.parametrize(
    ("predictions", "references", "named"),
    [
        ([], [], "predictions: empty"),
        (["a"], [], "references: 0 for 1"),
        (["a"], [[]], r"references\[0\]: \[\]"),
        (["a"], ["a"], r"references\[0\]: 'a'"),
    ],
)
def test_what_cannot_be_scored_is_named(predictions: list[str], references: list, named: str) -> None:
    for score in (quality, bleu, rouge, exact_match):
        with pytest.raises(ValueError, match=named):
            score(predictions, references)


def test_metrics_of_evaluate_say_the_same() -> None:
    expected = quality(PREDICTIONS, REFERENCES)
    metric = evaluate_metrics.combined()
    assert metric.compute(predictions=PREDICTIONS, references=REFERENCES) == expected
    for first, last in ((0, 2), (2, 5)):
        metric.add_batch(predictions=PREDICTIONS[first:last], references=REFERENCES[first:last])
    assert metric.compute() == expected
    alone = evaluate.combine([evaluate_metrics.Bleu(), evaluate_metrics.ExactMatch()])
    assert alone.compute(predictions=PREDICTIONS, references=REFERENCES).keys() == {"bleu", "exact_match"}


def test_metrics_of_evaluate_take_single_references_and_examples_one_by_one() -> None:
    for metric in (evaluate_metrics.Bleu(), evaluate_metrics.Rouge(), evaluate_metrics.ExactMatch()):
        assert isinstance(metric, evaluate.Metric)
        expected = metric.compute(predictions=PREDICTIONS, references=[texts[:1] for texts in REFERENCES])
        assert metric.compute(predictions=PREDICTIONS, references=[texts[0] for texts in REFERENCES]) == expected
        for prediction, texts in zip(PREDICTIONS, REFERENCES, strict=True):
            metric.add(prediction=prediction, reference=texts[0])
        assert metric.compute() == expected


@pytest.mark.parametrize(
    ("tokens", "reference", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 4, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [7], 0),
    ],
)
def test_first_divergence(tokens: list[int], reference: list[int], expected: int | None) -> None:
    assert first_divergence(tokens, reference) == expected


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "t5", "bart"])
def test_margin_is_that_of_the_logits_generate_saw(family: str) -> None:
    model, _ = families.pair(family)
    inputs = families.prompts(2)
    out = model.generate(
        **inputs, max_new_tokens=8, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True
    )
    for row in range(2):
        reference = out.sequences[row, -8:].tolist()
        for position in (0, 5):
            other = (reference[position] + 1) % families.VOCABULARY
            tokens = [*reference[:position], other, *reference[position + 1 :]]
            seen = out.logits[position][row]
            top = seen.topk(2).values
            found = divergence(model, {k: v[row : row + 1] for k, v in inputs.items()}, tokens, reference)
            assert found is not None and found.position == position
            assert found.margin == pytest.approx(float(top[0] - top[1]), abs=1e-5)
            assert found.gap == pytest.approx(float(seen.max() - seen[other]), abs=1e-5)
            assert found.gap >= found.margin
    gaps = [float(step[0].max() - step[0].topk(2).values[1]) for step in out.logits]
    assert max(gaps) - min(gaps) > 1e-3, "positions that have one and the same margin prove little"


def test_divergence_of_equal_and_of_shorter_outputs() -> None:
    model, _ = families.pair("llama")
    inputs = families.prompts(1)
    assert divergence(model, inputs, [5, 6], [5, 6]) is None
    ended = divergence(model, inputs, [5], [5, 6])
    assert ended is not None and (ended.position, ended.gap) == (1, None)
    with pytest.raises(ValueError, match=r"2 rows; .* input_ids\[i : i \+ 1\]"):
        next_logits(model, families.prompts(2), [5])
    assert next_logits(model, inputs, [5]).dtype == torch.float32
