"""Scores against hand-computed values and the libraries' own functions; divergences against generate's logits."""

import math
from dataclasses import replace
from statistics import mean
from typing import Any

import evaluate
import pytest
import sacrebleu
import torch
from helpers import families
from helpers.made_up_results import method, plain_call, result_of
from rouge_score.rouge_scorer import RougeScorer
from scipy.stats import beta, binom

from hf_specdec.bench.figures.frames import Part, whole
from hf_specdec.bench.figures.quality import (
    MEASURES,
    Difference,
    difference,
    exact_match,
    facts,
    of_differences,
    per_example,
    questions_needed,
    scores,
    verdict,
)
from hf_specdec.bench.figures.text_metrics import TextMetrics
from hf_specdec.bench.records import Asked, Result, Score
from hf_specdec.bench.running.divergence import divergence, first_divergence, next_logits

PREDICTIONS = ["the cat sat on the mat", "", "Yes.", "the the the the", " a b c d e "]
REFERENCES = [
    ["the cat is on the mat", "there is a cat on the mat"], ["silence"], ["No.", "Yes."],
    ["the cat", "a dog", "the bird"], ["a b c d e"],
]  # fmt: skip


def bleu(predictions: list[str], references: list[list[str]]) -> float:
    return quality(predictions, references)["bleu"]


def rouge(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
    return {name: score for name, score in quality(predictions, references).items() if name.startswith("rouge")}


def quality(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
    return TextMetrics().compute(predictions=predictions, references=references)


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
    assert bleu(["yes"], [["yes"]]) == 0 and exact_match("yes", ["yes"]) == 100


def test_rouge_by_hand() -> None:
    # 2 words shared of 3 and 4, 1 pair of 2 and 3; the longest common subsequence has 2 words.
    scores = rouge(["The cat, sat"], [["the cat ran fast"]])
    assert scores == pytest.approx({"rouge1": 400 / 7, "rouge2": 40.0, "rougeL": 400 / 7})
    # Of several references the best counts, for each figure by itself.
    scores = rouge(["b a c d"], [["a b c d", "x b a y"]])
    assert scores == pytest.approx({"rouge1": 100.0, "rouge2": 100 / 3, "rougeL": 75.0})


def test_exact_match_by_hand() -> None:
    assert mean(map(exact_match, PREDICTIONS, REFERENCES)) == 40
    assert (exact_match("", [""]), exact_match("Yes", ["yes"])) == (100, 0)


def test_facts_by_hand() -> None:
    reference = "According to the text, Edith was born in 1952, lives in Grenford and owns a purple chair."
    assert facts(reference, [reference]) == 100
    # One statement of four is wrong; exact match would give nothing.
    wrong = reference.replace("1952", "1953")
    assert facts(wrong, [reference]) == 75 and exact_match(wrong, [reference]) == 0
    # Statements count as wholes: neither a part of a word nor of a number passes for one.
    assert facts("owns a purple chairs", ["owns a purple chair"]) == 0
    assert facts("65 - 15 = 501", ["65 - 15 = 50. 50 + 12 = 62."]) == 0
    assert facts("65 - 15 = 50.", ["65 - 15 = 50. 50 + 12 = 62."]) == 50
    # The best of several references counts; an empty one is met by silence alone.
    assert facts("a bird", ["a cat", "a bird"]) == 100
    assert (facts("", [""]), facts("a", [""])) == (100, 0)


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
    assert quality([""], [["a b c d e"]]) == dict.fromkeys(MEASURES, 0)
    assert quality([""], [[""]]) == dict.fromkeys(MEASURES, 0) | {"exact_match": 100, "facts": 100}


def test_text_without_spaces_is_compared_by_characters() -> None:
    # 5 characters of 6 are shared, in order, and 3 pairs of 5.
    scores = rouge(["東京は晴です"], [["東京は雨です"]])
    assert scores == pytest.approx({"rouge1": 500 / 6, "rouge2": 60.0, "rougeL": 500 / 6})
    assert 0 < bleu(["今日東京は晴れです"], [["今日東京は雨です"]]) < 100
    assert RougeScorer(["rouge1"]).score("東京は雨です", "東京は雨です")["rouge1"].fmeasure == 0, "the control"


def test_the_metric_is_one_of_evaluate_and_can_be_fed_in_batches() -> None:
    metric = TextMetrics()
    assert isinstance(metric, evaluate.Metric)
    for first, last in ((0, 2), (2, 5)):
        metric.add_batch(predictions=PREDICTIONS[first:last], references=REFERENCES[first:last])
    assert metric.compute() == quality(PREDICTIONS, REFERENCES)


def judged(answers: dict[str, list[str]], references: list[str]) -> Result:
    """A result with these answers of each method, in two repeats."""
    calls = [
        replace(plain_call(index, repeat, method=name), texts=(text,))
        for name, texts in answers.items()
        for repeat in (0, 1)
        for index, text in enumerate(texts)
    ]
    result = result_of(calls, [method(name) for name in answers])
    result.prompts = [
        replace(one, references=(reference,), label="even" if one.index % 2 == 0 else "odd")
        for one, reference in zip(result.prompts, references, strict=True)
    ]
    return result


def asked(questions: dict[int, int]) -> Part:
    """Prompts of these questions, without calls."""
    result = result_of([], [])
    result.prompts = [Asked(index, question, "qa", 9) for index, question in questions.items()]
    return whole(result)


def test_scores_are_those_of_the_metrics_by_method_and_subtask() -> None:
    references = ["a b c d", "e f g h", "i j", "k l"]
    answers = {"plain": references, "bild": ["a b c x", "e f g h", "i x", "k l"]}
    result = judged(answers, references)
    found: dict[Any, Score] = {(one.method, one.subtask): one for one in scores(result)}
    assert found.keys() == {(name, label) for name in answers for label in (None, "even", "odd")}
    for (name, label), entry in found.items():
        chosen = [i for i in range(4) if label is None or i % 2 == (label == "odd")]
        expected = quality([answers[name][i] for i in chosen], [[references[i]] for i in chosen])
        assert entry.examples == len(chosen), "repeats say the same and count once"
        assert {key: getattr(entry, key) for key in MEASURES} == pytest.approx(expected, abs=1e-6)
    assert scores(replace(result, prompts=[replace(one, references=()) for one in result.prompts])) == []


def test_differences_are_paired_by_example() -> None:
    # Scores differ much from example to example, and the two methods' by exactly 10 points on each.
    references = [" ".join(f"w{i}" for i in range(10)) for _ in range(20)]
    texts = [" ".join([f"w{i}" for i in range(2 + n % 8)] + ["x"] * (8 - n % 8)) for n in range(20)]
    worse = [text.replace(f" w{1 + n % 8}", " y", 1) for n, text in enumerate(texts)]
    result = whole(judged({"plain": texts, "bild": worse}, references))
    assert len(set(per_example(result, "plain", "rougeL").values())) > 4
    found = difference(result, "bild", "plain", "rougeL")
    assert found is not None and (found.value, found.low, found.high) == pytest.approx((-10, -10, -10))
    same = difference(result, "plain", "plain", "rougeL")
    assert same is not None and (same.value, same.low, same.high) == (0, 0, 0)


def binary(worse: int, questions: int) -> Difference:
    """The difference where so many questions of all lose the whole score."""
    points = {index: -100.0 * (index < worse) for index in range(questions)}
    found = of_differences(asked({index: index for index in points}), points)
    assert found is not None and found.worse == worse
    return found


@pytest.mark.parametrize("worse", [0, 1, 5])
def test_the_bound_of_answers_right_or_wrong_is_that_of_clopper_and_pearson(worse: int) -> None:
    found = binary(worse, 50)
    assert found.bound == pytest.approx(-100 * beta.ppf(0.975, worse + 1, 50 - worse), rel=0.03)
    assert found.low is not None and found.low > found.bound, "the control: a bootstrap knows no unseen losses"


def test_the_bound_covers_a_rare_loss() -> None:
    """Of 50 questions each loses all with a chance of 3%: how often does the lower end lie above the true mean?"""
    found = [binary(worse, 50) for worse in range(6)]  # with 6 and more, both lie below
    chances = [binom.pmf(worse, 50, 0.03) for worse in range(6)]
    assert sum(chance for one, chance in zip(found, chances, strict=True) if one.bound > -3) <= 0.025
    missed = sum(chance for one, chance in zip(found, chances, strict=True) if one.low is not None and one.low > -3)
    assert missed > 0.2, "the control: the bootstrap misses it where no question lost"


def test_a_worse_answer_never_makes_a_better_verdict() -> None:
    bounds = []
    for loss in (0.0, 0.5, 4.0, 60.0):
        found = of_differences(
            asked({index: index for index in range(400)}), dict.fromkeys(range(399), 0.0) | {399: -loss}
        )
        bounds.append(found.bound)
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > -1 > bounds[-1]


def test_how_many_questions_exclude_a_loss() -> None:
    needed = questions_needed(1.0)
    assert needed == 368 and 1 - 0.025 ** (1 / needed) <= 0.01 < 1 - 0.025 ** (1 / (needed - 1))
    assert not binary(0, 340).excludes(1.0) and binary(0, 400).excludes(1.0) and not binary(1, 400).excludes(1.0)
    assert questions_needed(0.0) == math.inf and questions_needed(100.0) == 1


def test_turns_of_a_dialogue_are_one_question_and_every_answer_counts_as_worse() -> None:
    points = {index: 10.0 * (-1) ** index for index in range(200)}
    found = of_differences(asked({index: index // 2 for index in points}), points)
    assert found is not None and found.worse == 100 and (found.low, found.high) == (0, 0)
    assert found.bound == pytest.approx(-100 * (1 - 0.025 ** (1 / 100)), rel=0.03)
    alone = of_differences(asked({index: index for index in points}), points)
    assert alone is not None and alone.low is not None and alone.low < 0, "the control"


def test_rounding_makes_no_answer_worse() -> None:
    third = 200 / 3
    points = {0: third - sum([third] * 3) / 3 - 1e-14, 1: 0.0}
    found = of_differences(asked({0: 0, 1: 1}), points)
    assert found is not None and found.worse == 0


@pytest.mark.parametrize(("questions", "wrong", "words"), [
    (50, 0, "open: no answer worse"), (50, 1, "no: loss not excluded"), (400, 0, "yes"),
    (400, 1, "no: loss not excluded"),
])  # fmt: skip
def test_what_is_said_of_a_faster_method(questions: int, wrong: int, words: str) -> None:
    references = [f"answer {index}" for index in range(questions)]
    result = judged({"plain": references, "bild": ["wrong"] * wrong + references[wrong:]}, references)
    calls = [replace(c, seconds=1 + (c.seconds - 1) / 2) if c.method == "bild" else c for c in result.calls]
    found = verdict(whole(replace(result, calls=calls)), "bild", "plain")
    assert (found.words, found.as_good, found.won) == (words, words == "yes", wrong == 0)
    same_speed = verdict(whole(result), "bild", "plain")
    assert same_speed.words == ("no: neither" if wrong else "no: not faster")


@pytest.mark.parametrize(("tokens", "reference", "expected"), [
    ([1, 2, 3], [1, 2, 3], None), ([], [], None), ([1, 2, 3], [1, 4, 3], 1), ([1, 2], [1, 2, 3], 2),
    ([1, 2, 3], [1, 2], 2), ([], [7], 0),
])  # fmt: skip
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
