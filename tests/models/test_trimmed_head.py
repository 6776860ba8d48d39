"""A trimmed draft proposes listed tokens only, on every engine, and the output stays the target's.

`test_output_distributions.py` compares sampled outputs of trimmed drafts with exact distributions.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.families import EOS, FAMILIES, VOCABULARY, pair, prompts
from helpers.identity import same_as_plain
from helpers.patches import interpret_compiled_steps, noted
from helpers.word_tokenizer import word_tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel, set_seed

import hf_specdec
from hf_specdec.drafting import drafter_choice
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.models import recorded_passes
from hf_specdec.models.trimmed_head import as_ranges, listed_tokens
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.engine import Engine

LISTED = [EOS, *range(VOCABULARY - 1, 4, -2)]  # in any order
OTHERS = [token for token in range(VOCABULARY) if token not in LISTED]
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
ENGINES: dict[str, dict[str, Any]] = {
    "eager": {},
    "recorded": {},
    "without cache": {"use_cache": False},
    "captured": {"cache_implementation": "static"},
    "compiled": {"compile": True, "disable_tqdm": True},
}


@pytest.fixture
def proposed(monkeypatch) -> set[int]:
    """All tokens that are proposed in a test."""
    seen: set[int] = set()
    propose, run_draft = ModelDrafter.propose, Engine.run_draft

    def general(self: ModelDrafter, *args: Any) -> Any:
        proposal = propose(self, *args)
        rows = zip(proposal.tokens.tolist(), proposal.lengths, strict=True)
        seen.update(token for row, drafted in rows for token in row[:drafted])
        return proposal

    def prepared(self: Engine, *args: Any) -> Any:
        drafts, count = run_draft(self, *args)
        seen.update(int(token) for step in drafts.tokens for token in step)
        return drafts, count

    monkeypatch.setattr(ModelDrafter, "propose", general)
    monkeypatch.setattr(Engine, "run_draft", prepared)
    return seen


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch) -> dict[str, Any]:
    """Arguments of `generate` for an engine; what would be captured or compiled runs operation by operation."""
    if request.param == "eager":
        monkeypatch.setattr(recorded_passes, "recordable", lambda model: False)
    monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 1)
    monkeypatch.setattr(cuda_graphs, "captures", lambda device: request.param == "captured")
    interpret_compiled_steps(monkeypatch)
    return ENGINES[request.param]


@pytest.mark.parametrize("family", FAMILIES)
def test_listed_logits_are_the_whole_head_s_and_all_others_the_lowest(family: str) -> None:
    _, draft = pair(family)
    inputs = prompts(1)
    if draft.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    whole = draft(**inputs).logits
    with hf_specdec.trim_draft_head(draft, LISTED):
        trimmed = draft(**inputs).logits
    torch.testing.assert_close(trimmed[..., LISTED], whole[..., LISTED])
    cap = getattr(draft.config, "final_logit_softcapping", None)
    assert (trimmed[..., OTHERS] == (-torch.inf if cap is None else -cap)).all()
    assert torch.equal(draft(**inputs).logits, whole), "restored"


def test_only_listed_tokens_are_proposed_and_the_output_stays_the_target_s(engine, proposed) -> None:
    """What was recorded or compiled for the whole head does not serve the trimmed one, nor the reverse."""
    target, draft = pair("llama")

    def drafts() -> set[int]:
        proposed.clear()
        for rows in (1, 4):
            out = same_as_plain(target, draft, prompts(rows), GREEDY, **engine)
            assert 0 < out.speculation.acceptance_rate < 1
        return set(proposed)

    whole = drafts()
    assert not whole <= set(LISTED), "control: the whole head proposes others"
    trimmed = hf_specdec.trim_draft_head(draft, LISTED)
    assert drafts() <= set(LISTED)
    trimmed.restore()
    assert drafts() == whole
    hf_specdec.release(target)


def test_trimmed_drafts_are_recorded(monkeypatch) -> None:
    """As other drafts: one token and several."""
    monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 1)
    target, draft = pair("llama")
    with hf_specdec.trim_draft_head(draft, LISTED):
        same_as_plain(target, draft, prompts(1), GREEDY)
        assert sum(passes.made for passes in recorded_passes._known.all_of(draft).values()) in (1, 2)


@pytest.mark.parametrize("settings", [
    {"generation_strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.2},
    {"generation_strategy": "ensemble", "assistant_ensemble_weight": 1.0},
    {"entropy_threshold": 0.3},
    {"drafter": "hybrid"},
    {"assistant_tokenizer": word_tokenizer(VOCABULARY, order=-1), "tokenizer": word_tokenizer(VOCABULARY)},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 10, "eos_token_id": LISTED[3]},
], ids=lambda settings: next(iter(settings)))  # fmt: skip
def test_strategies_and_processors_keep_the_target_s_output(settings: dict[str, Any]) -> None:
    target, draft = pair("llama")
    of_plain = ("repetition_penalty", "min_new_tokens", "eos_token_id")
    call = {**GREEDY, **{name: value for name, value in settings.items() if name in of_plain}}
    with hf_specdec.trim_draft_head(draft, LISTED):
        same_as_plain(target, draft, prompts(1), call, **settings)


@pytest.mark.parametrize(("rows", "do_sample"), [(1, False), (3, False), (3, True)])
def test_a_constraint_that_allows_no_listed_token_ends_the_draft(rows: int, do_sample: bool, enabled) -> None:
    """It is never asked about a text that it does not allow."""
    target, draft = pair("llama")

    def allowed(row: int, ids: Tensor) -> list[int]:
        if len(ids) > 11:
            assert int(ids[-1]) in (OTHERS if len(ids) % 2 else LISTED)
        return LISTED if len(ids) % 2 else OTHERS

    call = {**prompts(rows), **GREEDY, "do_sample": do_sample, "top_k": 0, "prefix_allowed_tokens_fn": allowed}
    with hf_specdec.trim_draft_head(draft, LISTED):
        set_seed(0)
        settings = {"assistant_model": draft, "generation_strategy": "speculative", "return_dict_in_generate": True}
        out = target.generate(**call, **settings)
    assert out.speculation.drafted, "where it allows listed ones"
    assert max(max(r.drafted) for r in out.speculation.rounds) == 1
    if not do_sample:
        assert torch.equal(out.sequences, target.generate(**call))


@pytest.mark.parametrize("rows", [1, 3])
def test_nothing_is_drafted_where_every_listed_token_is_suppressed(rows: int) -> None:
    target, draft = pair("llama")
    with hf_specdec.trim_draft_head(draft, [5, 6, 7]):
        call = {**GREEDY, "suppress_tokens": [5, 6, 7]}
        assert same_as_plain(target, draft, prompts(rows), call).speculation.drafted == 0


def test_automatic_lengths_don_t_go_by_what_the_whole_head_measured(monkeypatch) -> None:
    situations = noted(monkeypatch, drafter_choice, "length_history", lambda model, situation, **_: situation)
    target, draft = pair("llama")
    same_as_plain(target, draft, prompts(1), GREEDY, num_assistant_tokens="auto")
    with hf_specdec.trim_draft_head(draft, LISTED):
        same_as_plain(target, draft, prompts(1), GREEDY, num_assistant_tokens="auto")
    same_as_plain(target, draft, prompts(1), GREEDY, num_assistant_tokens="auto")
    assert situations[0] == situations[2] != situations[1]


def tied() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)).eval()


def test_the_input_embedding_stays_whole_and_only_the_listed_rows_are_copied() -> None:
    draft = tied()
    embedding, bytes_before = draft.get_input_embeddings().weight, draft.get_memory_footprint()
    with hf_specdec.trim_draft_head(draft, torch.tensor([3, 30, 3])):
        assert draft.get_input_embeddings().weight is embedding and len(embedding) == 40
        copied = 2 * 16 * 4
        assert draft.get_memory_footprint() == bytes_before + copied + 2 * 8  # the rows and their places
    assert draft.get_output_embeddings().weight is embedding


def test_the_whole_head_follows_its_draft_to_another_dtype() -> None:
    _, draft = pair("llama")
    ids = prompts(1)["input_ids"]
    expected = copy.deepcopy(draft).to(torch.bfloat16)(ids).logits
    trimmed = hf_specdec.trim_draft_head(draft, LISTED)
    draft.to(torch.bfloat16)
    trimmed.restore()
    assert torch.equal(draft(ids).logits, expected)
    trimmed.restore()
    assert torch.equal(draft(ids).logits, expected), "restoring twice does no harm"


def headless() -> PreTrainedModel:
    return LlamaModel(tied().config)


def trimmed_before() -> PreTrainedModel:
    draft = tied()
    hf_specdec.trim_draft_head(draft, [1])
    return draft


def with_other_head() -> PreTrainedModel:
    draft = tied()
    draft.lm_head = torch.nn.Sequential(draft.lm_head)
    return draft


@pytest.mark.parametrize(("make", "tokens", "message"), [
    (tied, [], "token_ids is empty"),
    (tied, [2, 40], "token_ids holds 40, .* tokens 0 to 39"),
    (tied, [-1, 2], "token_ids holds -1"),
    (tied, "abc", "token_ids='abc': pass a list"),
    (tied, [1.5], "token_ids=.1.5.: pass a list"),
    (tied, [True, False], "token_ids=.True, False.: pass a list"),
    (tied, torch.ones(40).bool(), "token_ids=tensor.*: pass a list"),
    (tied, {2: "a", 3: "b"}, "token_ids={2.*: pass a list"),
    (tied, b"ab", "token_ids=b'ab': pass a list"),
    (tied, 7, "token_ids=7: pass a list"),
    (headless, [2], "draft=LlamaModel has no output head"),
    (with_other_head, [2], "has the output head Sequential"),
    (trimmed_before, [2], r"is trimmed already: call restore\(\) of its handle first.$"),
])  # fmt: skip
def test_errors_name_the_argument_and_the_way_out(make: Callable, tokens: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        hf_specdec.trim_draft_head(make(), tokens)


def test_frequent_tokens_are_ranked_and_hold_what_ends_a_text() -> None:
    tokenizer = word_tokenizer()
    texts = ["w5 w7 w5", [9, 7, 5], torch.tensor([9, 7])]
    assert hf_specdec.frequent_tokens(texts, tokenizer, 4) == [5, 7, 9, tokenizer.eos_token_id]
    assert hf_specdec.frequent_tokens(texts, tokenizer, 3) == [5, 7, tokenizer.eos_token_id]
    assert hf_specdec.frequent_tokens(texts, tokenizer, 40) == [5, 7, 9, tokenizer.eos_token_id]
    tokenizer.chat_template = "{% for m in messages %}w{{ 3 if m.role == 'user' else 4 }} {{ m.content }} {% endfor %}"
    assert hf_specdec.frequent_tokens(texts, tokenizer, 4) == [5, tokenizer.eos_token_id, 3, 4]
    with pytest.raises(ValueError, match="count=2 is below the 3 tokens"):
        hf_specdec.frequent_tokens(texts, tokenizer, 2)
    with pytest.raises(TypeError, match="texts='w5 w7' is one text"):
        hf_specdec.frequent_tokens("w5 w7", tokenizer, 3)


def test_a_trimmed_draft_is_saved_whole_with_its_list(tmp_path) -> None:
    """Where its head is its embedding; one whose whole head is gone could not be loaded again."""
    draft = tied()
    ids = prompts(1)["input_ids"] % draft.config.vocab_size
    expected = draft(ids).logits
    with hf_specdec.trim_draft_head(draft, [1, 2, 30]):
        trimmed = draft(ids).logits
        draft.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(ids).logits, expected)
    hf_specdec.trim_draft_head(loaded)
    torch.testing.assert_close(loaded(ids).logits, trimmed)
    assert getattr(draft.config, "draft_tokens", None) is None, "restored"
    apart = pair("llama")[1]
    handle = hf_specdec.trim_draft_head(apart, LISTED)
    with pytest.raises(ValueError, match=r"call restore\(\) of the handle"):
        apart.save_pretrained(tmp_path)
    handle.restore()
    apart.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "text"), [([], ""), ([7], "7"), ([0, 1, 2, 9, 4, 5], "0-2 4-5 9"), ([11, 10], "10-11")]
)
def test_a_list_of_tokens_is_told_in_ranges(tokens: list[int], text: str) -> None:
    assert as_ranges(tokens) == text
    for listed in (text, sorted(tokens)):
        assert listed_tokens(LlamaConfig(draft_tokens=listed)) == sorted(tokens)
    assert listed_tokens(LlamaConfig()) == []
