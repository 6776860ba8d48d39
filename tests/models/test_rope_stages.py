"""Frequencies that change with the length of the text: plain `generate`'s tokens before, after and across a change."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers.families import ROPE, SPECIAL, made, pair_of, perturbed, prompts
from helpers.identity import same_as_plain
from helpers.models import Passes
from helpers.pairwise import pairwise
from helpers.patches import interpret_compiled_steps
from torch import Tensor
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from hf_specdec import SpeculativeDecoding
from hf_specdec.models.cache_names import CACHE_NAME, cache_of
from hf_specdec.models.rope_stages import Stages, has_fixed_rope, stages_of

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [3.0, 4.0, 6.0, 8.0],
}
PROMPT, NEW_TOKENS = 11, 15
GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}


def _phi3(limit: int, **rope: Any) -> PreTrainedModel:
    return made("Phi3", **ROPE, original_max_position_embeddings=limit, **rope)()


def _phimoe(limit: int) -> PreTrainedModel:
    rope = {**LONG, "short_mscale": 1.0, "long_mscale": 1.5, "original_max_position_embeddings": limit}
    sizes = {"num_local_experts": 4, "original_max_position_embeddings": limit}
    model = made("Phimoe", **ROPE, **sizes, rope_parameters=rope)()
    model.set_experts_implementation("eager")  # the one for float64
    return model


def _llama(rope: dict[str, Any], **sizes: int) -> PreTrainedModel:
    return made("Llama", **{**ROPE, **sizes}, rope_parameters=rope)()


def _gemma3(limit: int) -> PreTrainedModel:
    """Layers of two kinds, one of which changes."""
    rope = {
        "full_attention": {**LONG, "original_max_position_embeddings": limit},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    sizes = {"head_dim": 8, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**ROPE, **SPECIAL, **sizes, rope_parameters=rope)
    )


KINDS: dict[str, Callable[[int], PreTrainedModel]] = {
    "phi3": lambda limit: _phi3(limit, rope_parameters=dict(LONG)),
    "phi3 that only drops its cache": _phi3,
    "phimoe": _phimoe,
    "llama": lambda limit: _llama({**LONG, "original_max_position_embeddings": limit}),
    "gemma3": _gemma3,
    "dynamic": lambda limit: _llama(
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, max_position_embeddings=limit
    ),
}


def _runs(kind: str) -> bool:
    """Whether transformers decodes such a model across the change: 5.17 loses a text with its cache, or raises."""
    model = KINDS[kind](PROMPT)
    source = inspect.getsource(type(model).prepare_inputs_for_generation)
    if "original_max_position_embeddings" in source and "next_sequence_length" not in source:
        return False
    try:
        for _ in range(2):
            model(torch.arange(PROMPT + 1)[None])
    except UnboundLocalError:
        return False
    return True


RUN = tuple(filter(_runs, KINDS))
DRAFTERS: dict[str, dict[str, Any]] = {"none": {"drafter": "none"}, "suffix": {"drafter": "suffix"}, "model": {}}
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "no cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "own cache": {},
    "compiled": {"compile": True},
}


@functools.cache
def changing(kind: str, limit: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A pair whose frequencies change at a length; tests share it."""
    return pair_of(lambda: KINDS[kind](limit))


def padded(rows: int, columns: int) -> dict[str, Tensor]:
    """Prompts of which every row has at least `columns` of padding."""
    return {key: torch.cat([value.new_zeros(rows, columns), value], dim=1) for key, value in prompts(rows).items()}


def as_if_fresh(model: PreTrainedModel) -> PreTrainedModel:
    """A copy, where it matters: dynamic NTK keeps the frequencies of the longest text until it reads a short one."""
    return copy.deepcopy(model) if model.config.rope_parameters.get("rope_type") == "dynamic" else model


def test_tokens_are_plain_generate_s_wherever_frequencies_change(monkeypatch) -> None:
    """In the prompt, right after it, and later; rows of a batch come to it in different rounds, or end before."""
    interpret_compiled_steps(monkeypatch)
    limits = (8, PROMPT, PROMPT + 1, PROMPT + 7)
    cases = pairwise(RUN, limits, (0, 3), (1, 3), (None, [5, 9, 13]), tuple(DRAFTERS), tuple(ENGINES))
    for kind, limit, columns, rows, eos, drafter, engine in cases:
        target, draft = changing(kind, limit)
        inputs, settings = padded(rows, columns), dict(ENGINES[engine])
        call = {**GREEDY, "eos_token_id": eos}
        plain = as_if_fresh(target).generate(**inputs, **call, use_cache=settings.get("use_cache", True))
        if engine == "own cache":
            settings[CACHE_NAME] = DynamicCache(config=target.config)
        decoding = SpeculativeDecoding(draft, num_assistant_tokens=4, **DRAFTERS[drafter])
        out = as_if_fresh(target).generate(**inputs, **call, **settings, custom_generate=decoding)
        assert torch.equal(out, plain), (kind, limit, columns, rows, eos, drafter, engine)


def test_prompts_read_in_chunks_across_the_change() -> None:
    """Each chunk has the frequencies of its own end, and Phi-3 drops its cache only for one that is long enough."""
    for kind, chunk, rows, length in pairwise(RUN, (4, 8, 9), (1, 3), (7, 16, 20)):
        target, draft = changing(kind, 8)
        call = {**GREEDY, "max_new_tokens": 9, "prefill_chunk_size": chunk}
        plain = as_if_fresh(target).generate(**prompts(rows, length), **call)
        decoding = SpeculativeDecoding(draft, num_assistant_tokens=4)
        out = as_if_fresh(target).generate(**prompts(rows, length), **call, custom_generate=decoding)
        assert torch.equal(out, plain), (kind, chunk, rows, length)


@pytest.mark.parametrize("kind", RUN)
def test_the_change_changes_tokens(kind: str) -> None:
    """Negative control: of the tests above; Phi-3 drops its cache with the usual frequencies, too."""
    texts = [changing(kind, limit)[0].generate(**prompts(4), **GREEDY) for limit in (PROMPT + 1, 100)]
    assert torch.equal(*texts) == (kind == "phi3 that only drops its cache")


@pytest.mark.parametrize("kind", ["phi3", "llama", "dynamic"])
def test_a_draft_s_frequencies_may_change_where_the_target_s_don_t(kind: str) -> None:
    target, draft = changing("llama", 100)[0], changing(kind, PROMPT + 6)[1]
    for rows in (1, 4):
        same_as_plain(target, as_if_fresh(draft), prompts(rows), GREEDY, num_assistant_tokens=4)


@pytest.mark.parametrize("kind", [kind for kind in ("phi3", "phimoe") if kind in RUN])
def test_a_target_as_its_own_draft_accepts_everything_across_the_change(kind: str) -> None:
    target, _ = changing(kind, PROMPT + 6)
    out = same_as_plain(target, target, prompts(1), GREEDY, num_assistant_tokens=4)
    assert out.speculation.acceptance_rate == 1.0
    # One round ends at the change. Behind it, rounds are as long as ever.
    drafted = [finished.drafted[0] for finished in out.speculation.rounds]
    assert len(drafted) <= 7 and drafted[-2] == 4


def test_rows_wait_for_each_other_only_at_the_change() -> None:
    target, _ = changing("llama", PROMPT + 8)
    out = same_as_plain(target, perturbed(target, 0.05), prompts(4), GREEDY, num_assistant_tokens=4)
    lengths = torch.tensor([r.new_tokens for r in out.speculation.rounds]).cumsum(0) + PROMPT
    waiting = [row for row, r in zip(lengths.tolist(), out.speculation.rounds, strict=True) if 0 in r.new_tokens]
    early = [row for row in waiting if min(row) <= PROMPT + 9]
    assert early and all(max(row) <= PROMPT + 9 for row in early)
    assert len({tuple(row) for row in lengths.tolist()}) == len(lengths), "every round adds something"


def chat(
    model: PreTrainedModel, inputs: dict[str, Tensor], turns: tuple[Any, Any], new_tokens: int, *, whole: bool
) -> list[tuple[Tensor, Tensor]]:
    """The text and the last layer's keys `[B, N, H, D]` after each of two turns, the second with the first one's cache.

    Args:
        turns: plain (None), or by a decoding.
        whole: the second turn gets the whole text, or only what the cache lacks.
    """
    call = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    one, other = ({} if decoding is None else {"custom_generate": decoding} for decoding in turns)
    first = model.generate(**inputs, **call, max_new_tokens=new_tokens, **one)
    cache, mask = cache_of(first), inputs["attention_mask"]
    keys = cache.layers[-1].keys.clone()
    said = torch.randint(3, 40, (len(mask), 5), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([first.sequences, said], dim=1)
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
    read = 0 if whole else cache.get_seq_length()
    given = {"input_ids": ids[:, read:], "attention_mask": mask, CACHE_NAME: cache}
    second = model.generate(**given, **call, max_new_tokens=9, **other)
    found = (first.sequences, keys), (second.sequences, cache_of(second).layers[-1].keys)
    return [(text, kept.transpose(1, 2)) for text, kept in found]


def test_chats_go_on_from_a_cache_across_the_change() -> None:
    """The change comes in the first turn, in what is said to the second, and in its answer; plain may go on, too."""
    settings = ((None, {}), ({}, None), ({}, {"drafter": "suffix"}))
    for case in pairwise(RUN, (14, 19, 26), settings, (1, 3), (0, 2), (4, 9), (True, False)):
        kind, limit, by_turn, rows, columns, new_tokens, whole = case
        (target, draft), inputs = changing(kind, limit), padded(rows, columns)
        turns = tuple(
            one if one is None else SpeculativeDecoding(draft, num_assistant_tokens=4, **one) for one in by_turn
        )
        plain = chat(as_if_fresh(target), inputs, (None, None), new_tokens, whole=whole)
        ours = chat(as_if_fresh(target), inputs, turns, new_tokens, whole=whole)
        for (text, kept), (wanted, keys) in zip(ours, plain, strict=True):
            assert torch.equal(text, wanted), case
            seen = torch.ones(keys.shape[:2], dtype=torch.bool)
            seen[:, : PROMPT + columns] = inputs["attention_mask"].bool()
            torch.testing.assert_close(kept[seen], keys[seen], msg=lambda told, case=case: f"{case}: {told}")


@pytest.mark.parametrize("kind", [kind for kind in ("phi3", "llama") if kind in RUN])
def test_rows_that_end_in_different_stages_leave_no_cache_to_go_on_from(kind: str) -> None:
    """The next call reads the whole text; a shorter row's cache would be continued with other frequencies."""
    target, draft = changing(kind, PROMPT + 6)
    end = int(target.generate(**prompts(3), **GREEDY)[1, PROMPT + 2])
    out = same_as_plain(target, draft, prompts(3), {**GREEDY, "eos_token_id": end})
    assert out.sequences.shape[1] > PROMPT + 8 and cache_of(out).get_seq_length() == 0


class LastTokenOnly(Phi3ForCausalLM):
    """Drops its cache as Phi-3 does, and forgets to ask for the whole text: transformers 5.17, and Phi-4-multimodal."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        limit, cache = self.config.original_max_position_embeddings, kwargs.get(CACHE_NAME)
        if cache and input_ids.shape[1] > limit and cache.get_seq_length() <= limit:
            kwargs[CACHE_NAME] = None
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)


def test_a_model_that_loses_the_text_with_its_cache_is_refused() -> None:
    """And not where it doesn't come to it. So are new tokens alone that make a model forget the rest."""
    limit = PROMPT + 6
    config = Phi3Config(**ROPE, **SPECIAL, original_max_position_embeddings=limit, rope_parameters=dict(LONG))
    target, draft = pair_of(lambda: LastTokenOnly(config))
    with (
        Passes(target) as passes,
        pytest.raises(ValueError, match=rf"LastTokenOnly drops its cache .* {limit} tokens .*max_length={limit + 1}"),
    ):
        target.generate(**prompts(1), **GREEDY, custom_generate=SpeculativeDecoding(draft))
    assert passes.count == 0
    for settings in ({"max_length": limit + 1}, {"max_length": 30, "use_cache": False}):
        same_as_plain(target, draft, prompts(1), {**GREEDY, "max_new_tokens": None, **settings})
    same_as_plain(target, draft, prompts(1, length=limit + 2), GREEDY)
    target, draft = changing("phi3", 16)
    first = target.generate(**prompts(1), **{**GREEDY, "max_new_tokens": 3}, return_dict_in_generate=True)
    call = {CACHE_NAME: cache_of(first), "attention_mask": torch.ones(1, 13 + 18, dtype=torch.long)}
    with pytest.raises(ValueError, match="Phi3ForCausalLM drops its cache"):
        target.generate(prompts(1, 18)["input_ids"], **call, **GREEDY, custom_generate=SpeculativeDecoding(draft))


def test_stages_from_positions() -> None:
    """The row with the least padding decides; tokens that only the cache has don't count in a row's length."""
    rope = {**LONG, "original_max_position_embeddings": 32}
    model = _llama(rope)
    positions = torch.arange(64).repeat(2, 1) - torch.tensor([[5], [3]])
    assert stages_of(model, positions, 20, 0, 60) == Stages((35,), False, 1, -4)
    assert stages_of(model, positions, 20, 10, 50) == Stages((25,), False, 1, 6)
    assert stages_of(model, None, 20, 0, 60) == Stages((32,), False, 0, -1)
    assert stages_of(model, None, 20, 0, 32) is None, "it ends before"
    assert has_fixed_rope(_llama({"rope_type": "default", "rope_theta": 1e4})) and not has_fixed_rope(model)


def test_going_rows_and_their_drafts() -> None:
    stages = Stages((20, 30), False, 0, -1)
    assert stages.going([0, 1, 2], [12, 18, 21]) == ([0, 1], 2)
    assert stages.going([2], [12, 18, 21]) == ([2], 9)
    assert stages.going([0, 1], [31, 40]) == ([0, 1], float("inf"))
    assert Stages((20,), True, 0, -1).going([0, 1], [21, 21]) == ([0, 1], 0)
