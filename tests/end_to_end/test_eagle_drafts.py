"""EAGLE-3 drafts of the `speculators` format: the target's text and distribution, the format's proposals, and passes.

Targets and drafts are random, over a vocabulary of 8 tokens of which 6 can be drafted.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import sampled_outputs
from helpers.eagle_drafts import READ, draft_for, proposed, stored
from helpers.identity import same_as_plain
from helpers.models import llama, prompts
from helpers.own_drafters import PAD, VOCABULARY, lend, needs_own_drafters, texts
from helpers.patches import choose_in_turn, returned
from helpers.sampled_outputs import FALSE_FAILURE, Combination, Draws, judged, odds_of_outputs
from helpers.trained_layers import trained
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_specdec
from hf_specdec import Eagle3Draft, SpeculativeDecoding, embedded
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.own_drafter import OwnDrafter
from hf_specdec.models.eagle_draft import Eagle3Config

GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "use_sliding_window": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "all tokens": {"tokens": None},
    "the target's embeddings": {"embeddings": False},
    "two layers": {"layers": 2},
    "Qwen 3's layers, one with a window": {"layers": 2, "of_layers": {"model_type": "qwen3", **SLIDING}},
    "a norm before the residual stream": {"fields": {"norm_before_residual": True}},
    "a norm before fusing": {"fields": {"norm_before_fc": True, "norm_output": True}},
    "a norm for each layer of the target": {"fields": {"fc_norm": True, "eagle_aux_hidden_state_layer_ids": [1, 0]}},
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return llama(seed=1, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_the_text_is_that_of_plain_generate(rows: int, target: PreTrainedModel, tmp_path) -> None:
    draft, inputs, drafted, accepted = draft_for(tmp_path, target), texts(rows), 0, 0
    plain = target.generate(**inputs, **GREEDY)
    for length in (1, 2, 3, 4, 5, "auto"):
        out = same_as_plain(target, draft, inputs, GREEDY, plain, num_assistant_tokens=length)
        drafted += out.speculation.drafted
        accepted += out.speculation.accepted
    assert 0 < accepted < drafted


CALLS: dict[str, dict[str, Any]] = {
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "prompt in chunks": {"prefill_chunk_size": 2},
    "end of text": {"eos_token_id": [3, 5], "pad_token_id": PAD},
    "a penalty that reads the text": {"repetition_penalty": 1.3},
    "a prefix that it can't draft": {"prefix_allowed_tokens_fn": lambda row, text: [4] if len(text) % 3 else [2, 4, 5]},
}


@pytest.mark.parametrize("drafter", ["model", "hybrid"])
@pytest.mark.parametrize("call", CALLS)
def test_it_is_so_with_other_arguments(call: str, drafter: str, target: PreTrainedModel, tmp_path) -> None:
    draft, settings = draft_for(tmp_path, target), {"num_assistant_tokens": 3, "drafter": drafter}
    same_as_plain(target, draft, texts(3), {**GREEDY, **CALLS[call]}, **settings)


def proposals(model: PreTrainedModel, draft: Eagle3Draft, inputs: dict[str, Tensor], monkeypatch) -> list[Any]:
    """For each round and row that drafts: the text without padding, and the proposal for it, of up to four tokens."""
    padding = (inputs["attention_mask"] == 0).sum(1).tolist()

    def rows(made: DraftProposal, self: Any, ids: Tensor, lengths: Any, room: Any) -> list[Any]:
        texts = [ids[row, padding[row] : length].clone() for row, length in enumerate(lengths)]
        return [(texts[row], made.tokens[row, :count].tolist()) for row, count in enumerate(made.lengths) if count]

    with monkeypatch.context() as patch, hf_specdec.enable(model, assistant_model=draft, num_assistant_tokens=4):
        rounds = returned(patch, OwnDrafter, "propose", rows)
        model.generate(**inputs, **GREEDY)
    return [one for found in rounds for one in found]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_proposals_are_the_formats(rows: int, variant: str, target: PreTrainedModel, tmp_path, monkeypatch) -> None:
    """Those of a draft that reads the whole text anew for every token, written down from the format's description."""
    weights = stored(tmp_path, target, **VARIANTS[variant])
    found = proposals(target, Eagle3Draft.from_pretrained(tmp_path), texts(rows), monkeypatch)
    assert len(found) > 6 * rows
    for text, made in found:
        assert made == proposed(tmp_path, target, weights, text, len(made))


@pytest.mark.parametrize("field", ["norm_before_residual", "norm_output"])
def test_control_another_architecture_proposes_otherwise(field: str, target, tmp_path, monkeypatch) -> None:
    weights = stored(tmp_path, target)
    draft = Eagle3Draft.from_pretrained(tmp_path)
    setattr(draft.config, field, True)
    found = proposals(target, draft, texts(1), monkeypatch)
    assert any(made != proposed(tmp_path, target, weights, text, len(made)) for text, made in found)


def test_passes_are_one_of_the_target_a_round_and_one_of_the_draft_a_token(target: PreTrainedModel, tmp_path) -> None:
    draft = draft_for(tmp_path, target, layers=2)
    for length in (1, 3):
        seen: list[Any] = []
        hooks = [
            part.register_forward_hook(lambda part, *_, to=seen: to.append(part)) for part in (target.model, draft)
        ]
        decoding = SpeculativeDecoding(draft, num_assistant_tokens=length)
        target.generate(**texts(2), **GREEDY, custom_generate=decoding)
        for hook in hooks:
            hook.remove()
        rounds = decoding.stats.rounds
        assert [rounds[0].draft_steps, *rounds[0].drafted] == [0, 0, 0], "nothing is drafted before the prompt is read"
        assert all(one.draft_steps == max(one.drafted) for one in rounds)
        assert seen.count(target.model) == len(rounds)
        assert seen.count(draft) == sum(one.draft_steps for one in rounds)


SAMPLED = [
    Combination(),
    Combination(verification="block", processor="top_p"),
    Combination(stop="entropy", processor="repetition", cache="off"),
    Combination(batch="one", cache="the caller's", processor="top_k"),
    Combination(strategy="bild", stop="auto", cache="static", end="no end"),
    Combination(strategy="ensemble", verification="block", processor="temperature"),
]


@pytest.fixture
def sampled_draft(tmp_path, monkeypatch) -> Eagle3Draft:
    """One of the target whose sampled outputs are enumerated; it can draft three of its four tokens."""
    fields = {"eagle_aux_hidden_state_layer_ids": [0, 0]}
    draft = draft_for(tmp_path, sampled_outputs.models()["target"], (1, 2, 3), fields=fields)
    monkeypatch.setitem(sampled_outputs.models(), "model", draft)
    return draft


@pytest.mark.parametrize("c", SAMPLED, ids=", ".join)
def test_outputs_are_distributed_as_the_targets_own(c: Combination, sampled_draft: Eagle3Draft, monkeypatch) -> None:
    choose_in_turn(monkeypatch, 2, 1)  # where lengths are automatic
    draws = judged(c)
    assert 0 < draws.accepted < draws.drafted


def test_control_a_vocabulary_that_is_taken_for_the_targets_fails(sampled_draft: Eagle3Draft, monkeypatch) -> None:
    """Drafts are drawn from the distribution of other tokens than it is returned for."""
    propose = OwnDrafter.propose

    def unmapped(self: Any, ids: Tensor, lengths: Any, room: Any) -> DraftProposal:
        made = propose(self, ids, lengths, room)
        probs = None if made.probs is None else made.probs.roll(-1, dims=-1)
        return DraftProposal(made.tokens, made.lengths, probs, made.steps)

    monkeypatch.setattr(OwnDrafter, "propose", unmapped)
    assert odds_of_outputs(Draws(SAMPLED[0]), SAMPLED[0]) < FALSE_FAILURE


def test_it_is_saved_as_it_was_read_and_may_have_another_dtype(target: PreTrainedModel, tmp_path) -> None:
    methods = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 2}]}
    draft = draft_for(tmp_path / "first", target, fields={"speculators_config": methods})
    draft.save_pretrained(tmp_path / "second")
    again = Eagle3Draft.from_pretrained(tmp_path / "second", dtype=torch.float32)
    assert {draft.dtype, again.dtype} == {torch.float64, torch.float32}
    assert again.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(weight, draft.state_dict()[name].to(weight)) for name, weight in again.state_dict().items())
    out = same_as_plain(target, again, texts(3), GREEDY)
    assert max(max(one.drafted) for one in out.speculation.rounds) == 2, "the length that it was trained for"
    assert Eagle3Config().transformer_layer_config.model_type == "llama"


def damaged(change: Callable[[dict[str, Any], dict[str, Tensor]], Any], folder: Path) -> str:
    """What loading says after a change of the configuration or the weights."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises((ValueError, RuntimeError)) as error:
        Eagle3Draft.from_pretrained(folder)
    return str(error.value)


DAMAGES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], tuple[str, ...]]] = {
    "eagle 1": (lambda c, w: c.update(speculators_model_type="eagle"), ("'eagle' in", "config.json", "'eagle3'")),
    "no format": (lambda c, w: c.pop("speculators_model_type"), ("speculators_model_type=None",)),
    "other layers": (lambda c, w: c["transformer_layer_config"].update(model_type="gemma3_text"), ("'gemma3_text'",)),
    "no map": (lambda c, w: w.pop("d2t"), ("d2t of its weights are missing",)),
    "no head": (lambda c, w: w.pop("lm_head.weight"), ("lm_head.weight of",)),
    "weights of the first EAGLE": (lambda c, w: w.update({"fc.bias": torch.ones(32)}), ("fc.bias of",)),
    "a map out of the vocabulary": (lambda c, w: w["d2t"].add_(1), ("d2t does not map its 6 tokens", "of 8")),
    "a map onto one token": (lambda c, w: w["d2t"].copy_(-torch.arange(6)), ("d2t does not map its 6 tokens",)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_checkpoints_that_it_can_not_read_are_refused_by_name(damage: str, target: PreTrainedModel, tmp_path) -> None:
    stored(tmp_path, target)
    change, words = DAMAGES[damage]
    message = damaged(change, tmp_path)
    assert all(word in message for word in words), message


def refused(model: PreTrainedModel, draft: Any, *words: str) -> None:
    with hf_specdec.enable(model, assistant_model=draft), pytest.raises(ValueError) as error:
        model.generate(**prompts(1), max_new_tokens=4)
    assert all(word in str(error.value) for word in ("assistant_model=Eagle3Draft", *words)), error.value


def test_drafts_of_other_models_are_refused_by_what_differs(target: PreTrainedModel, tmp_path) -> None:
    draft = draft_for(tmp_path / "a", target)
    wide = llama(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2)
    refused(wide, draft, "hidden states of width 32, not 64", "made for this model")
    own = draft_for(tmp_path / "b", target, embeddings=False, fields={"target_hidden_size": 32})
    refused(wide, own, "embeddings of width 32, not 64")
    flat = llama(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1)
    refused(flat, draft, f"layers {READ}, not among 1")
    refused(llama(vocab_size=2048, hidden_size=32, num_hidden_layers=2), draft, "a vocabulary of 8 tokens, not 2048")
    refused(target, draft_for(tmp_path / "c", target).to("meta"), "'meta'")
    with hf_specdec.enable(target, assistant_model=draft), pytest.raises(ValueError, match="speculation_type='dflash'"):
        target.generate(**prompts(1), max_new_tokens=4, speculation_type="dflash")


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=needs_own_drafters)])
def test_what_is_trained_for_a_target_is_accepted(kind: str, monkeypatch) -> None:
    """After a few steps, much more often than one of the vocabulary's tokens by chance."""
    path = embedded.model_path("target")
    target, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    drafter = trained(kind, target, tokenizer, steps=25, rows=1 if kind == "eagle3" else 2)
    target.double()
    if kind == "eagle3":
        asked = {"assistant_model": drafter.double()}
    else:
        drafter.layers.double()
        lend(monkeypatch, target, drafter)
        asked = {"use_mtp": True}
    texts = [embedded.render_prompt(embedded.examples(name, n=1)[0]) for name in embedded.SUBTASKS[:3]]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    out = same_as_plain(
        target, None, inputs, {"max_new_tokens": 16, "do_sample": False}, num_assistant_tokens=2, **asked
    )
    assert out.speculation.acceptance_rate > (0.05 if kind == "eagle3" else 0.1)
