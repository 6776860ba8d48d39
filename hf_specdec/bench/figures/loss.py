"""How much quality a method loses against plain decoding, by the measure on which it loses most."""

from __future__ import annotations

from hf_specdec.bench.figures.bootstrap import Interval
from hf_specdec.bench.figures.quality import difference
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.figures.speed import calls_of
from hf_specdec.bench.figures.tradeoff import JUDGED


def worst_difference(result: Result, method: str, plain: str, *, deciding: bool = False) -> Interval | None:
    """A method's score minus plain decoding's, in points, by the measure of `JUDGED` whose interval reaches lowest.

    Without references, greedy answers are compared with plain decoding's own, by ROUGE-L.
    `deciding`: see `bootstrap.interval`.

    Returns:
        None if quality is unknown: no example in common, or sampled answers without references.
    """
    if any(prompt.get("references") for prompt in result["prompts"]):
        found = [difference(result, method, plain, measure, deciding=deciding) for measure in JUDGED]
    elif result["sampling"]:
        return None
    else:
        texts = {
            index: [text]
            for call in calls_of(result, plain, repeat=0)
            for index, text in zip(call.prompts, call.texts or (), strict=False)
        }
        prompts = [{**prompt, "references": texts.get(prompt["index"], [])} for prompt in result["prompts"]]
        found = [difference({**result, "prompts": prompts}, method, plain, "rougeL", deciding=deciding)]
    known = [one for one in found if one is not None]
    return min(known, key=lambda one: one.value if one.low is None else one.low, default=None)
