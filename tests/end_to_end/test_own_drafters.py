"""Drafters that models bring along: the target's text and distribution, transformers' proposals, and its passes.

The targets and their layers are random, over a vocabulary of 8 tokens, so that some drafts are accepted by chance.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers import sampled_outputs
from helpers.identity import same_as_plain, speculated
from helpers.models import llama, prompts
from helpers.own_drafters import (
    BLOCK_TARGETS,
    FAMILIES,
    PAD,
    SEVERAL,
    block_draft,
    lend,
    needs_own_drafters,
    proposals_by_length,
    target_and_block_draft,
    target_with_mtp,
    texts,
)
from helpers.patches import choose_in_turn
from helpers.sampled_outputs import FALSE_FAILURE, Combination, Draws, judged, odds_of_outputs
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, modeling_layers
from transformers.generation import candidate_generator

import hf_specdec
from hf_specdec import SpeculativeDecoding
from hf_specdec.compat import mtp_private
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.own_drafter import OwnDrafter
from hf_specdec.models.cache_names import CACHE_NAME
from hf_specdec.models.hidden_states import HiddenStates

pytestmark = needs_own_drafters
BY_LAYERS = [(family, layers) for family in FAMILIES for layers in (1, 3) if layers == 1 or family in SEVERAL]
# transformers' assisted generation refuses recurrent targets.
WITHOUT_STATE = [(family, layers) for family, layers in BY_LAYERS if not family.startswith("Qwen")]
GENERATORS = ("MTPCandidateGenerator", "DFlashTokenCandidateGenerator")
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def with_mtp(monkeypatch) -> Callable[..., PreTrainedModel]:
    """Makes a target that brings layers along."""

    def made(family: str = "DeepseekV3ForCausalLM", layers: int = 1) -> PreTrainedModel:
        model, mtp = target_with_mtp(family, layers)
        lend(monkeypatch, model, mtp)
        return model

    return made


def drafted_and_accepted(stats: Any) -> tuple[int, int]:
    return sum(sum(one.drafted) for one in stats.rounds), sum(sum(one.accepted) for one in stats.rounds)


@pytest.mark.parametrize(("family", "layers"), BY_LAYERS)
def test_the_text_is_that_of_plain_generate(family: str, layers: int, with_mtp) -> None:
    model = with_mtp(family, layers)
    drafted = accepted = 0
    for rows, lengths in ((1, (1, "auto")), (2, (5,)), (4, (1, 3))):
        inputs = texts(rows)
        plain = model.generate(**inputs, **GREEDY)
        for length in lengths:
            out = same_as_plain(model, None, inputs, GREEDY, plain, use_mtp=True, num_assistant_tokens=length)
            made = drafted_and_accepted(out.speculation)
            drafted, accepted = drafted + made[0], accepted + made[1]
    assert 0 < accepted < drafted


@pytest.mark.parametrize("family", BLOCK_TARGETS)
def test_the_text_is_that_of_plain_generate_with_drafts_in_blocks(family: str) -> None:
    model, draft = target_and_block_draft(family)
    drafted = accepted = 0
    for rows, lengths in ((1, (1, None)), (2, (2, 9)), (4, (1, None, "auto"))):
        inputs = texts(rows)
        plain = model.generate(**inputs, **GREEDY)
        for length in lengths:
            settings = {"speculation_type": "dflash", "num_assistant_tokens": length}
            out = same_as_plain(model, draft, inputs, GREEDY, plain, **settings)
            made = drafted_and_accepted(out.speculation)
            drafted, accepted = drafted + made[0], accepted + made[1]
            assert max(one.draft_steps for one in out.speculation.rounds) == 1
    assert 0 < accepted < drafted


CALLS: dict[str, dict[str, Any]] = {
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "end of text": {"eos_token_id": [3, 5]},
    "prompt in chunks": {"prefill_chunk_size": 2},
    "a penalty that reads the text": {"repetition_penalty": 1.3},
    "BiLD at its lossless limit": {"generation_strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.0},
    "confidence": {"assistant_confidence_threshold": 0.5},
    "errors of the draft tolerated": {"on_draft_error": "continue"},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("call", CALLS)
def test_it_is_so_with_other_arguments(call: str, rows: int, with_mtp) -> None:
    given = dict(CALLS[call])
    ours = {name: given.pop(name) for name in list(given) if not hasattr(GenerationConfig(), name)}
    ours |= {name: given.pop(name) for name in ("assistant_confidence_threshold",) if name in given}
    model = with_mtp("DeepseekV3ForCausalLM", 2)
    out = same_as_plain(model, None, texts(rows), {**GREEDY, **given}, use_mtp=True, num_assistant_tokens=3, **ours)
    assert drafted_and_accepted(out.speculation)[0]


def test_it_goes_on_from_the_callers_cache(with_mtp) -> None:
    model, inputs = with_mtp("Glm4MoeForCausalLM", 2), texts(2, padded=False)
    outputs = []
    for settings in ({}, {"generation_strategy": "speculative", "use_mtp": True}):
        cache = DynamicCache(config=model.config)
        with hf_specdec.enable(model):
            first = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 5}, **{CACHE_NAME: cache}, **settings)
            outputs.append(model.generate(first, **GREEDY, **{CACHE_NAME: cache}, **settings))
    assert torch.equal(*outputs)


def test_the_argument_may_stand_in_a_generation_config(with_mtp) -> None:
    model, inputs = with_mtp(), texts(3)
    model.generation_config.update(max_new_tokens=24, do_sample=False, pad_token_id=PAD)
    plain = model.generate(**inputs)
    for config in (GenerationConfig(), model.generation_config):
        config.use_mtp = True
        assert torch.equal(speculated(model, None, **inputs, generation_config=config), plain)
        stats = hf_specdec.last_speculation(model)
        assert stats is not None and drafted_and_accepted(stats)[0]


def proposals(model: PreTrainedModel, monkeypatch, length: int, **asked: Any) -> list[dict[int, list[int]]]:
    """What transformers' generator and ours propose for a prompt, by the length of the text.

    Args:
        length: of ours, which is that of theirs.
        asked: what asks for the drafter.
    """
    theirs: dict[int, list[int]] = {}
    with monkeypatch.context() as patch:
        for generator in (getattr(candidate_generator, name) for name in GENERATORS):
            patch.setattr(generator, "get_candidates", noting(generator.get_candidates, theirs))
        ours = proposals_by_length(patch)
        plain = model.generate(**texts(1), **GREEDY, **asked)
        found = speculated(model, None, **texts(1), **GREEDY, **{**asked, "num_assistant_tokens": length})
    assert torch.equal(found, plain)
    end = plain.shape[1] - length  # drafts that would not fit any more differ
    return [{n: tokens for n, tokens in made.items() if n < end} for made in (theirs, ours)]


def noting(get: Callable[..., Any], into: dict[int, list[int]]) -> Callable[..., Any]:
    """A generator's `get_candidates`, whose drafts are noted by the length of the text."""

    def get_candidates(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = get(self, input_ids, *args, **kwargs)
        if (length := input_ids.shape[1]) < found[0].shape[1]:
            into[length] = found[0][0, length:].tolist()
        return found

    return get_candidates


@pytest.mark.parametrize(("family", "layers"), WITHOUT_STATE)
def test_proposals_are_those_of_transformers(family: str, layers: int, with_mtp, monkeypatch) -> None:
    model = with_mtp(family, layers)
    theirs, ours = proposals(model, monkeypatch, layers, use_mtp=True)
    assert theirs == ours and len(ours) > 3


@pytest.mark.parametrize("family", BLOCK_TARGETS)
def test_proposals_of_blocks_are_those_of_transformers(family: str, monkeypatch) -> None:
    model, draft = target_and_block_draft(family)
    theirs, ours = proposals(model, monkeypatch, 4, assistant_model=draft, speculation_type="dflash")
    assert theirs == ours and len(ours) > 3


def test_control_states_of_the_place_before_give_other_proposals(with_mtp, monkeypatch) -> None:
    of = HiddenStates.of
    monkeypatch.setattr(HiddenStates, "of", lambda self, places, width: of(self, [p - 1 for p in places], width))
    theirs, ours = proposals(with_mtp(), monkeypatch, 1, use_mtp=True)
    assert theirs != ours


def test_control_keys_of_rejected_drafts_give_other_proposals(with_mtp, monkeypatch) -> None:
    """Nothing is read again after a round, although later layers had read drafts."""
    model = with_mtp("DeepseekV3ForCausalLM", 3)
    monkeypatch.setattr(
        "hf_specdec.models.states_runner.StatesRunner.begin",
        lambda self, lengths: setattr(self, "_certain", [max(n - 2, 0) if self.passes else 0 for n in lengths]),
    )
    theirs, ours = proposals(model, monkeypatch, 3, use_mtp=True)
    assert theirs != ours


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_passes_are_one_of_the_target_a_round_and_one_of_a_layer_a_token(layers: int, length: int, with_mtp) -> None:
    """Every layer runs, also for shorter drafts; nothing is drafted before the target has read the prompt."""
    model, seen = with_mtp("Glm4MoeForCausalLM", layers), []
    decoding = SpeculativeDecoding(drafter="mtp", num_assistant_tokens=length)
    counted = model.model.register_forward_hook(lambda *_: seen.append(1))
    model.generate(**texts(2), **GREEDY, custom_generate=decoding)
    counted.remove()
    first, *rest = decoding.stats.rounds
    assert len(seen) == 1 + len(rest) and (first.draft_steps, max(first.drafted)) == (0, 0)
    assert {one.draft_steps for one in rest if max(one.drafted) == length} == {max(length, layers)}
    assert {one.draft_steps for one in rest} <= {0, *range(layers, max(length, layers) + 1)}


SAMPLED = [
    Combination(drafter="mtp"),
    Combination(drafter="mtp", verification="block", processor="top_p"),
    Combination(drafter="mtp", stop="entropy", processor="repetition", cache="off"),
    Combination(drafter="mtp", batch="one", cache="the caller's"),
    Combination(drafter="mtp", strategy="bild", stop="auto", cache="static", end="no end"),
    Combination(drafter="mtp", strategy="ensemble", verification="block", processor="temperature"),
    Combination(drafter="dflash"),
    Combination(drafter="dflash", verification="block", processor="repetition", cache="static"),
    Combination(drafter="dflash", stop="auto", batch="one", processor="top_k"),
]


@pytest.fixture
def sampled_target(monkeypatch) -> PreTrainedModel:
    """The target whose sampled outputs are enumerated, with two layers."""
    target = sampled_outputs.models()["target"]
    monkeypatch.setattr(target.config, "num_mtp_layers", 2, raising=False)
    torch.manual_seed(3)
    mtp = modeling_layers.MtpModel(target, 2)
    mtp.layers.double()
    lend(monkeypatch, target, mtp.eval())
    monkeypatch.setitem(sampled_outputs.models(), "dflash", block_draft(hidden_size=16, target_layer_ids=[0]))
    return target


@pytest.mark.parametrize("c", SAMPLED, ids=", ".join)
def test_outputs_are_distributed_as_the_targets_own(c: Combination, sampled_target, monkeypatch) -> None:
    choose_in_turn(monkeypatch, 2, 1)  # where lengths are automatic
    draws = judged(c)
    assert 0 < draws.accepted < draws.drafted


def test_control_other_probabilities_than_those_drawn_from_fail(sampled_target, monkeypatch) -> None:
    propose = OwnDrafter.propose

    def flattened(self: Any, ids: Tensor, lengths: Any, room: Any) -> DraftProposal:
        made = propose(self, ids, lengths, room)
        probs = None if made.probs is None else torch.full_like(made.probs, 1 / made.probs.shape[-1])
        return DraftProposal(made.tokens, made.lengths, probs, made.steps)

    monkeypatch.setattr(OwnDrafter, "propose", flattened)
    c = SAMPLED[0]
    assert odds_of_outputs(Draws(c), c) < FALSE_FAILURE


def test_layers_are_read_from_the_checkpoint_once(tmp_path, monkeypatch) -> None:
    model, mtp = target_with_mtp("Qwen3_5ForCausalLM", 1)
    weights = dict(model.state_dict())
    names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
    for name, weight in mtp.layers.state_dict().items():
        part = name.removeprefix("0.")
        place = part.removeprefix("mtp_block.")
        stored = f"layers.0.{place}" if place != part else part.replace(part.split(".")[0], names[part.split(".")[0]])
        weights[f"mtp.{stored}"] = weight
    model.save_pretrained(tmp_path, state_dict=weights)
    loads, load = [], mtp_private.load
    monkeypatch.setattr(mtp_private, "load", lambda given: loads.append(given) or load(given))
    read = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    for field in ("num_mtp_layers", "mtp_layer_types"):
        delattr(read.config, field)
    read.config.mtp_num_hidden_layers = 1  # as Qwen's own checkpoints say it
    for target in (model, read):
        target.generation_config.update(**GREEDY, pad_token_id=PAD)
    inputs, made = texts(2), []
    with hf_specdec.enable(read, generation_strategy="speculative", num_assistant_tokens=2):
        for _ in range(2):
            made.append(read.generate(**inputs, use_mtp=True, return_dict_in_generate=True))
    assert loads == [read]
    lend(monkeypatch, model, mtp)
    lent = speculated(model, None, **inputs, use_mtp=True, return_dict_in_generate=True, num_assistant_tokens=2)
    for out in made:
        assert torch.equal(out.sequences, lent.sequences)
        assert [one.accepted for one in out.speculation.rounds] == [one.accepted for one in lent.speculation.rounds]


def refused(model: PreTrainedModel, *words: str, **asked: Any) -> None:
    asked = asked or {"use_mtp": True}
    with pytest.raises(ValueError) as error:
        speculated(model, None, **prompts(1), max_new_tokens=4, **asked)
    assert all(word in str(error.value) for word in words), error.value


def test_models_without_layers_are_refused_by_what_is_missing(monkeypatch) -> None:
    model = llama()
    named = "drafter='mtp'", "LlamaForCausalLM"
    refused(model, *named, "has no num_mtp_layers", "choose another drafter")
    model.config.num_mtp_layers = 1
    refused(model, *named, "its checkpoint", "choose another drafter")
    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    refused(model, *named, "needs transformers 5.23 or newer", "5.17.0 is installed")


def test_drafts_of_blocks_that_do_not_fit_are_refused() -> None:
    model, draft = llama(), block_draft()
    blocks = {"speculation_type": "dflash"}
    refused(model, "assistant_model=None", "drafter='dflash'", "pass one", **blocks)
    refused(model, "assistant_model=LlamaForCausalLM", "is for DFlash drafts", assistant_model=llama(), **blocks)
    refused(model, "assistant_model=MuseGlimmerAssistantModel", "needs drafter='dflash'", assistant_model=draft)
    model.config.hidden_size = 48
    refused(model, "of width 32", "of width 48", "made for this model", assistant_model=draft, **blocks)
