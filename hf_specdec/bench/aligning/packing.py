"""Packs: a prompt followed by several of its answers, each of which sees the prompt and itself.

The prompt is read once for all of them. Prompts are often much longer than their answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.bench.aligning.batches import IGNORED, Collator, Row, answer_logits, rectangle
from hf_specdec.bench.models.loading import LoadedPair

PACKED = 8  # answers, at most


class Packs:
    """Collates packs and single answers of a decoder-only target, with stored distributions.

    All answers of a pack have the same distribution at their first position, which counts once.

    Args:
        answers: rows of `answers.target_answers`.

    Attributes:
        dataset: packs as places in `answers` (`members`), with the length of each.
    """

    def __init__(self, pair: LoadedPair, answers: Any) -> None:
        import datasets  # here because it takes seconds

        self.single, self.answers = Collator(pair), answers
        places: dict[tuple[int, ...], list[int]] = {}
        for place, prompt in enumerate(answers["prompt"]):
            places.setdefault(tuple(prompt), []).append(place)
        lengths = [len(answer) for answer in answers["answer"]]
        packs = [
            (members[start : start + PACKED], len(prompt))
            for prompt, members in places.items()
            for start in range(0, len(members), PACKED)
        ]
        self.several = len(packs) < len(lengths)
        self.dataset = datasets.Dataset.from_dict(
            {
                "members": [members for members, _ in packs],
                "length": [prompt + sum(lengths[place] for place in members) for members, prompt in packs],
            }
        )

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """As `Collator`; packs also have `segments` and `position_ids` `[B, L]`."""
        if "members" not in rows[0]:
            return self.single(rows)
        packs = [self.answers[list(row["members"])] for row in rows]
        texts = [(list(pack["prompt"][0]), [list(answer) for answer in pack["answer"]]) for pack in packs]
        ids = [[*prompt, *(token for answer in some for token in answer[:-1])] for prompt, some in texts]
        columns: dict[str, list[list[int]]] = {"labels": [], "segments": [], "position_ids": []}
        for prompt, (first, *others) in texts:
            read = [
                (number, place) for number, answer in enumerate((first, *others), 1) for place in range(len(answer) - 1)
            ]
            later = [token for answer in others for token in answer[1:]]
            columns["labels"].append([*[IGNORED] * (len(prompt) - 1), *first, *later])
            columns["segments"].append([*[0] * len(prompt), *(number for number, _ in read)])
            columns["position_ids"].append([*range(len(prompt)), *(len(prompt) + place for _, place in read)])
        batch = {
            "input_ids": rectangle(ids, self.single.pad),
            "attention_mask": rectangle([[1] * len(row) for row in ids], 0),
            "labels": rectangle(columns["labels"], IGNORED),
            "segments": rectangle(columns["segments"], -1),
            "position_ids": rectangle(columns["position_ids"], 0),
        }
        for name in ("target_tokens", "target_log_probs"):
            kept = [found[int(number > 0) :] for pack in packs for number, found in enumerate(pack[name])]
            batch[name] = torch.tensor([position for found in kept for position in found])
        return batch

    @torch.no_grad()
    def suit(self, model: PreTrainedModel) -> bool:
        """Whether a model reads the longest pack as it reads its answers one by one.

        Models with a sliding window shorter than the text don't, nor those that derive positions from the mask.
        """
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return False
        row = max(self.dataset, key=lambda pack: (len(pack["members"]) > 1, pack["length"]))
        rows = [self.answers[place] for place in row["members"]]
        apart = answer_logits(model, self.single(rows)).split([len(one["answer"]) for one in rows])
        expected = torch.cat([found[int(number > 0) :] for number, found in enumerate(apart)])
        found = answer_logits(model, self([row]))
        return torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
