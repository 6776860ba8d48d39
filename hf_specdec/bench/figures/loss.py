"""How much quality a method loses against plain decoding, by whatever measure it loses most."""

from __future__ import annotations

from hf_specdec.bench.figures.bootstrap import Interval
from hf_specdec.bench.figures.quality import difference
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.figures.speed import calls_of
from hf_specdec.bench.figures.tradeoff import JUDGED


def worst_difference(result: Result, method: str, plain: str) -> Interval | None:
    """Points that a method's answers score above plain decoding's, below 0 for a loss; of `JUDGED` the lowest end.

    Without references, greedy answers are held against plain decoding's own, by ROUGE-L.

    Returns:
        None where nothing tells: no example in common, or sampled answers without references.
    """
    if any(prompt.get("references") for prompt in result["prompts"]):
        found = [difference(result, method, plain, measure) for measure in JUDGED]
    elif result["sampling"]:
        return None
    else:
        texts = {
            index: [text]
            for call in calls_of(result, plain, repeat=0)
            for index, text in zip(call.prompts, call.texts or (), strict=False)
        }
        prompts = [{**prompt, "references": texts.get(prompt["index"], [])} for prompt in result["prompts"]]
        found = [difference({**result, "prompts": prompts}, method, plain, "rougeL")]
    known = [one for one in found if one is not None]
    return min(known, key=lambda one: one.value if one.low is None else one.low, default=None)
