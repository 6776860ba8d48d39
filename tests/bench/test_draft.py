"""The task `draft`: drafts cut out of their target, prompts of the target's own, trimmed heads, and the judgement."""

import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from helpers import models
from helpers.generating_classes import small_pair
from helpers.made_up_results import drafted_call, method, plain_call, result_of
from helpers.tiny_pair import save_pair
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_specdec
from hf_specdec.bench.aligning import own_prompts, training
from hf_specdec.bench.aligning.answers import target_answers
from hf_specdec.bench.aligning.batches import Collator, answer_logits
from hf_specdec.bench.aligning.clock import Clock
from hf_specdec.bench.aligning.gathering import answered
from hf_specdec.bench.aligning.losses import forward_kl, lk_hybrid, on_tokens, total_variation
from hf_specdec.bench.aligning.own_prompts import own_groups, own_questions
from hf_specdec.bench.aligning.shape import check_target, cut_draft, layer_changes, layers_that_change_most
from hf_specdec.bench.aligning.training import _ByClock
from hf_specdec.bench.aligning.trimmed import TrimmedVocabulary
from hf_specdec.bench.figures.frames import whole
from hf_specdec.bench.inputs.questions import Question
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.reports.trained_drafts import advice
from hf_specdec.bench.results import load
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import run_task
from hf_specdec.models.trimmed_head import listed_tokens

TOKENS = list(range(0, models.VOCABULARY, 2))
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}assistant:"


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return models.llama(num_hidden_layers=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny target of four layers, with a chat template; several tokens end its texts, so that prompts end soon."""
    path, _ = save_pair(tmp_path_factory.mktemp("pair"))
    ends = [models.EOS, *range(3, 10)]
    target = models.llama(num_hidden_layers=4, vocab_size=320, max_position_embeddings=160, eos_token_id=ends)
    target.save_pretrained(path)
    words = AutoTokenizer.from_pretrained(path)
    words.chat_template = TEMPLATE
    words.save_pretrained(path)
    return path


def settings_for(folder: Path, output: Path, **more: Any) -> Settings:
    given: dict[str, Any] = {"max_new_tokens": 8, "batch_sizes": (4,), "num_assistant_tokens": 3, "layers": (0, 3)}
    return Settings(
        task="draft", model_name=str(folder), assisted_generation=True, dataset="own", loss="lk_hybrid",
        top_k_targets=8, minutes=0.7, output_dir=output, **given | more,
    )  # fmt: skip


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(2, models.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(seed))


def test_a_draft_of_all_layers_is_its_target(target: PreTrainedModel) -> None:
    """And without one of them it is another model."""
    everything = cut_draft(target, range(5), TOKENS)
    torch.testing.assert_close(everything(ids()).logits, target(ids()).logits)
    assert not torch.allclose(cut_draft(target, [0, 1, 3, 4], TOKENS)(ids()).logits, target(ids()).logits)
    assert everything.model.layers[0].mlp.up_proj.weight is not target.model.layers[0].mlp.up_proj.weight


def test_a_draft_has_the_layers_that_it_was_cut_of(target: PreTrainedModel) -> None:
    cut = cut_draft(target, (0, 2, 4), TOKENS)
    for place, layer in enumerate((0, 2, 4)):
        for key, weight in cut.model.layers[place].state_dict().items():
            assert torch.equal(weight, target.model.layers[layer].state_dict()[key])
    assert torch.equal(cut.lm_head.weight, target.lm_head.weight) and cut.config.num_hidden_layers == 3
    with pytest.raises(BenchError, match="--layers: 5 is none of the target's layers 0 to 4"):
        cut_draft(target, (0, 5), TOKENS)


def test_layers_are_chosen_by_what_they_change(target: PreTrainedModel) -> None:
    """A layer that adds nothing changes nothing; the last is always kept."""
    idle = cut_draft(target, range(5), TOKENS)
    with torch.no_grad():
        idle.model.layers[2].self_attn.o_proj.weight.zero_()
        idle.model.layers[2].mlp.down_proj.weight.zero_()
    batch = {"input_ids": ids(), "attention_mask": torch.ones_like(ids()), "labels": ids()}
    changes = layer_changes(idle, batch)
    assert len(changes) == 4 and changes[2] < 1e-3 < min(changes[:2])
    assert layers_that_change_most(changes, 4) == (0, 1, 3, 4)
    assert layers_that_change_most([0.1, 0.2, 0.3], 2) == (0, 3)


def test_a_trimmed_head_survives_saving_and_loading(target: PreTrainedModel, tmp_path) -> None:
    """The folder is an ordinary one: whole without this package, trimmed to its list with it. Both loops take it."""
    cut_draft(target, range(5), TOKENS).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = target(ids()).logits
    torch.testing.assert_close(loaded(ids()).logits, expected)
    options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids()[:1])}
    plain = target.generate(ids()[:1], **options)
    assert torch.equal(target.generate(ids()[:1], assistant_model=loaded, **options), plain)
    with hf_specdec.trim_draft_head(loaded):
        logits = loaded(ids()).logits
        ours = target.generate(ids()[:1], custom_generate=hf_specdec.SpeculativeDecoding(loaded), **options)
    assert torch.equal(ours, plain)
    torch.testing.assert_close(logits[..., TOKENS], expected[..., TOKENS])
    assert bool(logits[..., 1::2].isneginf().all())
    with pytest.raises(ValueError, match="token_ids is empty"):
        hf_specdec.trim_draft_head(models.llama())


def test_training_sees_the_logits_of_the_list_only(target: PreTrainedModel) -> None:
    cut = cut_draft(target, (0, 4), TOKENS)
    whole_head, expected = cut.get_output_embeddings(), cut(ids()).logits
    trimmed = TrimmedVocabulary.of(cut)
    assert trimmed is not None and TrimmedVocabulary.of(target) is None
    torch.testing.assert_close(cut(ids()).logits, expected[..., TOKENS])
    assert trimmed.columns(torch.tensor([0, 1, 4])).tolist() == [0, len(TOKENS), 2]
    trained = {name for name, weight in cut.named_parameters() if weight.requires_grad}
    assert trained and not any("embed" in name or "lm_head" in name for name in trained)
    trimmed.restore()
    assert cut.get_output_embeddings() is whole_head
    torch.testing.assert_close(cut(ids()).logits, expected)


def test_the_loss_leaves_out_what_the_draft_can_not_propose() -> None:
    """KL over the other tokens, renormalised; total variation counts them as lost. Gradients stay finite."""
    free = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    columns = torch.tensor([[0, 6, 2]]).expand(5, 3)
    found = on_tokens(free, columns)
    assert bool(found[:, 1].isneginf().all())
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    kept = [0, 2, 3]
    p = target[:, kept].log_softmax(-1)
    torch.testing.assert_close(forward_kl(found, target), (p.exp() * (p - found[:, kept])).sum(-1))
    apart = total_variation(found, target)
    assert bool((apart >= target[:, 1].exp() / 2).all())
    share = torch.exp(-3 * (1 - apart.mean()))
    torch.testing.assert_close(lk_hybrid(found, target), share * forward_kl(found, target) + (1 - share) * apart)
    lk_hybrid(found, target).sum().backward()
    assert free.grad is not None and bool(free.grad.isfinite().all()) and bool(free.grad.any())


def test_the_target_writes_prompts_and_goes_on_with_them(folder: Path, tmp_path, monkeypatch) -> None:
    """Whole, different ones; a new start begins with those of the last, without half a line that it left."""
    settings, file = settings_for(folder, tmp_path), tmp_path / "prompts.jsonl"
    pair = load_pair(settings)
    groups = list(islice(own_groups(file, settings, pair), 3))
    texts = [question.turns[0] for group in groups for question in group[0]]
    assert len(texts) == len(set(texts)) == 12
    assert [question.index for group in groups for question in group[0]] == list(range(12))
    assert [one[0].turns[0] for one in own_questions(file, [3, 7])] == [texts[3], texts[7]]
    with file.open("a") as stream:
        stream.write('["half')
    with monkeypatch.context() as patch:
        patch.setattr(own_prompts, "timed_call", None)  # nothing is written anew
        again = list(islice(own_groups(file, settings, pair), 3))
    assert again == groups and len(list(islice(own_groups(file, settings, pair), 6))) == 6
    assert all(isinstance(json.loads(line), list) for line in file.read_text().splitlines())


def test_a_target_that_can_not_begin_a_prompt_is_told(tmp_path) -> None:
    path, _ = save_pair(tmp_path / "pair")
    settings = settings_for(path, tmp_path)
    with pytest.raises(BenchError, match="has neither a chat template nor a <bos>"):
        next(own_groups(tmp_path / "prompts.jsonl", settings, load_pair(settings)))


def test_distributions_are_kept_while_answers_are_written(folder: Path, tmp_path) -> None:
    """Those of a pass over the whole text, whatever the rows' lengths."""
    settings = replace(settings_for(folder, tmp_path), dataset="x")
    pair = load_pair(settings)
    questions = [Question(n, "x", ("tell me " * n,)) for n in range(1, 4)]
    rows = list(target_answers(tmp_path / "a", settings, pair, [[questions]], Processes(), plain(pair)))
    batch = Collator(pair)(rows)
    with torch.no_grad():
        logits = answer_logits(pair.target, batch)
    assert torch.equal(batch["target_tokens"], logits.topk(8).indices)
    torch.testing.assert_close(batch["target_log_probs"], on_tokens(logits, batch["target_tokens"]).float())
    assert not pair.target._forward_hooks, "none is left"


def test_a_prompt_is_read_once_for_several_answers(folder: Path, tmp_path) -> None:
    """Which are those that it gets alone, with the same distributions."""
    settings = replace(settings_for(folder, tmp_path), dataset="x")
    pair = load_pair(settings)
    questions = [Question(n, "x", ("tell me " * n,)) for n in (1, 3)]
    read: list[tuple[int, ...]] = []
    hook = pair.target.model.embed_tokens.register_forward_hook(lambda _, ids, out: read.append(tuple(ids[0].shape)))
    found = {}
    for name, rows in (("alone", questions), ("several", [question for question in questions for _ in range(3)])):
        read.clear()
        found[name] = list(target_answers(tmp_path / name, settings, pair, [[rows]], Processes(), plain(pair)))
        assert [rows for rows, tokens in read if tokens > 1] == [2], "rows with a prompt to read"
    hook.remove()
    for place, row in enumerate(found["several"]):
        one = found["alone"][place // 3]
        assert {row[name] == one[name] for name in ("index", "prompt", "answer", "target_tokens")} == {True}
        torch.testing.assert_close(torch.tensor(row["target_log_probs"]), torch.tensor(one["target_log_probs"]))


@pytest.mark.usefixtures("a_second_each_look")
def test_few_prompts_are_answered_again_while_there_is_time(folder: Path, tmp_path) -> None:
    """By other answers, which a new start finds again, beside answers to prompts of the target's own.

    Without time for more there is one to each, and no other: the control.
    """
    given = [[Question(n, "x", ("tell me " * n,))] for n in range(1, 7)]
    found, own = {}, {}
    for minutes in (1.0, 0.05):
        settings = replace(settings_for(folder, tmp_path / str(minutes)), minutes=minutes, dataset="x")
        pair = load_pair(settings)
        _, learned, held_out, general = answered(settings, pair, given[:4], given[4:], Processes())
        assert sorted(held_out["index"]) == [5, 6]
        texts = [[row["answer"] for row in learned if row["index"] == n] for n in range(1, 5)]
        found[minutes] = [(len(some), len({tuple(one) for one in some})) for some in texts]
        again = answered(settings, pair, given[:4], given[4:], Processes())
        assert again.learned["answer"] == learned["answer"]
        own[minutes] = None if general is None else len(general)
        assert own[minutes] is None or again.general["answer"] == general["answer"]
    assert own[0.05] is None and own[1.0] > 4
    assert found[0.05] == 4 * [(1, 1)] and all(count > 2 and different > 1 for count, different in found[1.0])


@pytest.mark.usefixtures("a_second_each_look")
def test_training_reads_a_prompt_once_for_several_answers(folder: Path, tmp_path, monkeypatch) -> None:
    """Two packs of eight a step; without packs, the control, as many texts as asked for. Both begin alike."""
    given = [[Question(n, "x", ("tell me " * n,))] for n in range(1, 7)]
    settings = replace(settings_for(folder, tmp_path), minutes=1.0, dataset="x", steps=2, learning_rate=1e-3)
    pair = load_pair(settings)
    _, learned, held_out, _ = answered(settings, pair, given[:4], given[4:], Processes())
    found = {}
    for name in ("packed", "single"):
        draft = cut_draft(pair.target, (0, 3), range(320))
        own = replace(pair, draft=draft, draft_name="x", draft_tokenizer=pair.tokenizer)
        if name == "single":
            monkeypatch.setattr(training, "_packs", lambda *_: None)
        found[name] = training.train(settings, own, draft, learned, held_out, tmp_path / name, Processes())
    assert found["packed"].rows == 16 and found["single"].rows == 4
    assert found["packed"].held_out_curve[0] == found["single"].held_out_curve[0]


def test_a_clock_goes_on(tmp_path) -> None:
    (tmp_path / "seconds").write_text("7.5")
    found = Clock(tmp_path / "seconds", 10)
    assert found.spent >= 7.5 and list(Clock(tmp_path / "seconds", 7).until_over([1, 2])) == []
    assert list(Clock(tmp_path / "seconds", 1e9).until_over([1, 2])) == [1, 2]
    found.save()
    assert float((tmp_path / "seconds").read_text()) >= 7.5


@pytest.mark.parametrize(("cost", "expected"), [(0, 12), (3, 8), (12, 2)])
def test_evaluations_take_a_fifth_of_the_time(cost: int, expected: int) -> None:
    """Twelve where they cost nothing; of a step a second in two minutes."""
    time: Any = SimpleNamespace(limit=120, spent=0, over=False)
    told: Any = SimpleNamespace(log_history=[{"eval_loss": 1.0}], global_step=0)
    callback = _ByClock(time)
    time.spent = cost
    callback.on_evaluate(None, told, SimpleNamespace(should_training_stop=False))
    found = 0
    while time.spent < time.limit:
        time.spent += 1
        control: Any = SimpleNamespace(should_evaluate=False, should_training_stop=False)
        callback.on_step_end(None, told, control)
        if control.should_evaluate:
            found += 1
            time.spent += cost
            callback.on_evaluate(None, told, control)
    assert found == expected


@pytest.mark.usefixtures("a_second_each_look")
def test_a_draft_is_made_trained_judged_and_saved(folder: Path, tmp_path, capsys) -> None:
    """Of the layers that trials choose, on its own prompts, for others; a second run does not overwrite it."""
    asked = folder.parent / "asked.jsonl"
    asked.write_text("".join(f'{{"q": "tell me {"more " * n}"}}\n' for n in range(3)))
    settings = replace(
        settings_for(folder, tmp_path, layers=()), dataset=str(asked), prompt_column="q", own_prompts=True,
        draft_dtype="bfloat16",
    )  # fmt: skip
    run_task(settings)
    (path,) = tmp_path.glob("draft-*.json.gz")
    result, printed = load(path), capsys.readouterr().out
    facts = result.training
    assert facts is not None and facts.saved == str(tmp_path / "target-draft")
    assert len(facts.agreement) == len(facts.held_out_curve) >= 2 and facts.tokens_read > 0
    assert f'AutoModelForCausalLM.from_pretrained("{facts.saved}")' in printed
    assert "model.generate(**inputs, assistant_model=draft, generation_strategy=" in printed
    assert "Not recommended: decoding" in printed or "Decoding with it has" in printed
    assert len(result.prompts) == 3 and facts.prompts > 3, "a data set that only judges"
    assert sum("agreement with the target after" in note for note in result.notes) == 3, "shapes that were tried"
    assert any("of the tokens of held-out answers are among those" in note for note in result.notes)
    assert [one.name for one in result.methods][2:] == ["suffix", "before", "after", "auto"]
    saved, own = (AutoModelForCausalLM.from_pretrained(path) for path in (facts.saved, folder))
    assert (saved.dtype, own.dtype) == (torch.bfloat16, torch.float64)
    assert len(listed_tokens(saved.config)) == facts.vocabulary
    assert saved.config.num_hidden_layers == len(facts.layers)
    assert torch.equal(saved.lm_head.weight, own.lm_head.weight.bfloat16()), "the head is the target's"
    trained, old = saved.model.layers[0], own.model.layers[facts.layers[0]]
    assert not torch.equal(trained.mlp.up_proj.weight, old.mlp.up_proj.weight)
    kept = {one.name.partition("-")[0] for one in tmp_path.iterdir()}
    assert kept == {"draft", "answers", "target"}, "no checkpoint, no journal"
    outputs = {(call.prompts, call.method): call.outputs for call in result.calls}
    assert all(found == outputs[prompts, "plain"] for (prompts, _), found in outputs.items()), "the target's own"
    with pytest.raises(BenchError, match=r"--output_dir: .*target-draft' is there already"):
        run_task(settings)


@pytest.mark.parametrize(
    ("gain", "words"),
    [(1.06, "**Decoding with it has 1.06"), (1.04, "recommended: decoding with it hardly"), (0.9, "it is slower than")],
)
def test_a_draft_that_does_not_pay_is_not_recommended(gain: float, words: str) -> None:
    """Below 1.05 times plain decoding on the same engine, whatever became of acceptance."""
    calls = [plain_call(prompt, method="none recorded") for prompt in range(3)]
    # Five tokens after the first round; plain decoding takes half a second for as many.
    calls += [
        drafted_call([(4, 4), (4, 4)], prompt=prompt, method="after", seconds=1 + 0.5 / gain) for prompt in range(3)
    ]
    methods = [method("none recorded", "none"), method("after", "speculative", same_engine="none recorded")]
    assert words in advice(whole(result_of(calls, methods)), ["after"])
    for seconds, faster in ((1 + 0.4 / gain, True), (1 + 0.6 / gain, False)):
        copied = [
            drafted_call([(4, 4), (4, 4)], prompt=prompt, method="copies", seconds=seconds) for prompt in range(3)
        ]
        both = [*methods, method("copies", "speculative", same_engine="none recorded")]
        told = advice(whole(result_of([*calls, *copied], both)), ["after"], "copies")
        assert ("faster without it" in told) == faster and (words in told) != faster


@pytest.mark.parametrize(("more", "words"), [
    ({"loss": "cross_entropy", "top_k_targets": None}, "--loss: 'cross_entropy' does not learn from distributions"),
    ({"precision": "int8"}, "--precision: 'int8' weights can't be trained"),
    ({"model_name": "synthetic:smollm-135m"}, "--model_name: 'synthetic:smollm-135m' has random weights"),
    ({"minutes": 1e-9}, "--minutes: 1e-09 are too few for a single batch of answers"),
], ids=lambda value: value if isinstance(value, str) else None)  # fmt: skip
@pytest.mark.usefixtures("a_second_each_look")
def test_refusals(more: dict[str, Any], words: str, folder: Path, tmp_path) -> None:
    with pytest.raises(BenchError, match=words):
        run_task(replace(settings_for(folder, tmp_path), **more))


@pytest.mark.parametrize(("more", "words"), [
    ({"layers": (0, 4)}, "--layers: 4 is none of the target's layers 0 to 3"),
    ({"draft_vocabulary": 1}, "--draft_vocabulary: 1 is not possible"),
])  # fmt: skip
def test_what_no_answer_can_mend_is_refused_before_the_target_answers(
    more: dict[str, Any], words: str, folder: Path, tmp_path
) -> None:
    with pytest.raises(BenchError, match=words):
        run_task(settings_for(folder, tmp_path, **more))
    assert not list(tmp_path.glob("answers-*"))


def small(name: str) -> PreTrainedModel:
    return small_pair(getattr(transformers, name), torch.float64)[0]


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Gemma3ForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM"])
def test_layers_of_other_families(name: str) -> None:
    """With all of a layer's experts; all layers are the target, and one is not."""
    target = small(name)
    check_target(LoadedPair("x", target, None))  # type: ignore[arg-type]
    expected = target(ids() % 20).logits
    torch.testing.assert_close(cut_draft(target, range(2), TOKENS)(ids() % 20).logits, expected)
    assert not torch.allclose(cut_draft(target, (1,), TOKENS)(ids() % 20).logits, expected)


@pytest.mark.parametrize(("name", "words"), [
    ("LlavaForConditionalGeneration", "reads more than text"),
    ("Gemma3ForConditionalGeneration", "reads more than text"),
    ("Qwen3NextForCausalLM", "has recurrent layers"),
    ("Mamba2ForCausalLM", "has recurrent layers"),
    ("T5GemmaForConditionalGeneration", "(T5GemmaForConditionalGeneration) does not keep all of its layers in one"),
])  # fmt: skip
def test_targets_without_a_shape_are_refused_by_name(name: str, words: str) -> None:
    words = re.escape(f"--model_name: 'x' {words}") + ".*; drafts are made for models that read text, and for Whisper"
    with pytest.raises(BenchError, match=words):
        check_target(LoadedPair("x", small(name), None))  # type: ignore[arg-type]
