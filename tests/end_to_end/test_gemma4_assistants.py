"""Gemma 4's assistants, which read the target's keys: its text and distribution, and the proposals of transformers."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from helpers import sampled_outputs
from helpers.identity import same_as_plain, speculated
from helpers.models import llama, prompts
from helpers.own_drafters import PAD, VOCABULARY, proposals_by_length, target_and_assistant, texts
from packaging.version import Version
from transformers.generation import candidate_generator

import hf_specdec

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "Gemma4AssistantForCausalLM"), reason="newer versions of transformers have assistants"
)
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
CACHES: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 2, "cache_implementation": "dynamic"},
}


@pytest.fixture
def pair(monkeypatch) -> Any:
    return target_and_assistant(monkeypatch)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("cache", CACHES)
def test_the_text_is_that_of_plain_generate(cache: str, recorded: bool, pair, monkeypatch) -> None:
    """Over both kinds of caches that the target may have, whose sliding layers keep other tokens."""
    if not recorded:
        monkeypatch.setattr("hf_specdec.generation.supports_recorded_row", lambda *_: False)
        monkeypatch.setattr("hf_specdec.generation.supports_rows_cache", lambda *_: False)
    drafted = accepted = 0
    for rows, lengths in ((1, (4, "auto")), (2, (1,)), (4, (4, "auto"))):
        inputs = texts(rows)
        plain = pair[0].generate(**inputs, **GREEDY)
        for length in lengths:
            out = same_as_plain(*pair, inputs, {**GREEDY, **CACHES[cache]}, plain, num_assistant_tokens=length)
            drafted += sum(sum(one.drafted) for one in out.speculation.rounds)
            accepted += sum(sum(one.accepted) for one in out.speculation.rounds)
            assert out.speculation.rounds[0].draft_steps == 0
            assert all(one.draft_steps == max(one.drafted) for one in out.speculation.rounds)
    assert 0 < accepted < drafted


def test_rows_may_end_apart(pair) -> None:
    for drafter in ("model", "hybrid"):
        call = {**GREEDY, "eos_token_id": [3, 5], "pad_token_id": PAD}
        same_as_plain(*pair, texts(4), call, num_assistant_tokens=3, drafter=drafter)


@pytest.mark.skipif(
    Version(transformers.__version__).release < (5, 22),
    reason="earlier, transformers' first draft read the hidden state of the prompt's first token",
)
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("rows_cache", [True, False])
def test_proposals_are_those_of_transformers(cut: bool, rows_cache: bool, monkeypatch) -> None:
    """Whose generator leaves the keys of the first rejected draft in place; where these are cut there, too."""
    target, draft = target_and_assistant(monkeypatch, window=64)
    theirs: dict[int, list[int]] = {}
    generator = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    get = generator.get_candidates
    named = inspect.signature(get)

    def get_candidates(*args: Any, **kwargs: Any) -> Any:
        given = named.bind(*args, **kwargs).arguments
        length, outputs = given["input_ids"].shape[1], given["model_outputs"]
        if outputs is not None and cut:
            for kind, keys in list(outputs.shared_kv_states.items()):
                outputs.shared_kv_states[kind] = tuple(one[:, :, : length - 1] for one in keys)
        found = get(*args, **kwargs)
        if length < found[0].shape[1]:
            theirs[length] = found[0][0, length:].tolist()
        return found

    monkeypatch.setattr(generator, "get_candidates", get_candidates)
    ours = proposals_by_length(monkeypatch)
    if not rows_cache:
        monkeypatch.setattr("hf_specdec.generation.supports_recorded_row", lambda *_: False)
    draft.generation_config.num_assistant_tokens = 3
    plain = target.generate(**texts(1), **GREEDY, assistant_model=draft)
    assert torch.equal(speculated(target, None, **texts(1), **GREEDY, assistant_model=draft), plain)
    both = [{n: tokens for n, tokens in made.items() if n < plain.shape[1] - 3} for made in (theirs, ours)]
    assert (both[0] == both[1]) == cut and min(map(len, both)) > 3


def test_outputs_are_distributed_as_the_targets_own(monkeypatch) -> None:
    target, draft = target_and_assistant(monkeypatch)
    call = {"do_sample": True, "top_k": 0, "max_new_tokens": 2, "eos_token_id": None, "num_return_sequences": 4000}
    inputs = {name: rows[:, -4:] for name, rows in texts(1).items()}
    with torch.no_grad(), hf_specdec.enable(target, generation_strategy="speculative"):
        probs = target(**inputs).logits[0, -1].softmax(-1)
        following = torch.cat([inputs["input_ids"].expand(VOCABULARY, -1), torch.arange(VOCABULARY)[:, None]], dim=1)
        probs = probs.unsqueeze(1) * target(input_ids=following).logits[:, -1].softmax(-1)
        torch.manual_seed(0)
        out = target.generate(**inputs, **call, assistant_model=draft, num_assistant_tokens=1)
    exact = {(a, b): float(probs[a, b]) for a in range(VOCABULARY) for b in range(VOCABULARY)}
    assert sampled_outputs.odds([[tuple(row) for row in out[:, 4:].tolist()]], [exact]) > sampled_outputs.FALSE_FAILURE


def test_targets_without_such_keys_are_refused(pair) -> None:
    model = llama()
    with pytest.raises(ValueError) as error:
        speculated(model, None, **prompts(1), max_new_tokens=4, assistant_model=pair[1])
    assert "assistant_model=Gemma4AssistantForCausalLM" in str(error.value)
    assert "model=LlamaForCausalLM has 0 such layers" in str(error.value)
