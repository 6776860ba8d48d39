"""The embedded corpus and models: splits, prompt lengths, sizes, quality, a resumable trainer."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import hf_specdec
from hf_specdec import embedded
from hf_specdec.bench.figures import quality
from hf_specdec.embedded.architectures import Shape, build
from hf_specdec.embedded.batches import batch_for_step, packed_batch, whole_batch
from hf_specdec.embedded.training import Recipe, grow, train

MICRO = Shape(hidden=32, inner=32, layers=1)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded.model_path("target"))


@pytest.fixture(scope="module")
def models():
    auto = {name: AutoModelForSeq2SeqLM if name.startswith("t5") else AutoModelForCausalLM for name in embedded.names()}
    return {name: auto[name].from_pretrained(embedded.model_path(name)).eval() for name in auto}


# The corpus


def alone(code: str) -> str:
    """What code prints in a process of its own; hf_specdec itself loads torch, so the corpus is loaded without it."""
    start = (
        "import sys, types; package = types.ModuleType('hf_specdec'); package.__path__ = ['hf_specdec'];"
        "sys.modules['hf_specdec'] = package; import hf_specdec.embedded;"
    )
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, check=True, cwd=root
    ).stdout


def test_the_eight_subtasks_have_references():
    assert set(embedded.SUBTASKS) == {
        "multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag", "law analytics",
        "grammar correction",
    }  # fmt: skip
    for subtask in embedded.SUBTASKS:
        for example in embedded.examples(subtask, n=5):
            assert example.subtask == subtask
            assert len(example.turns) == len(example.references) == (2 if subtask == "multi-turn" else 1)
            with pytest.raises(dataclasses.FrozenInstanceError):
                example.turns = ()


def test_examples_are_determined_by_their_seed_in_every_process():
    other = alone("print(hf_specdec.embedded.examples('rag', n=3, seed=7))")
    assert other.strip() == str(embedded.examples("rag", n=3, seed=7))
    assert embedded.examples("rag", n=3, seed=7) != embedded.examples("rag", n=3, seed=8)
    assert embedded.examples("rag", n=3, seed=7) == embedded.examples("rag", n=5, seed=7)[:3]


@pytest.mark.parametrize("subtask", embedded.SUBTASKS)
def test_no_prompt_is_in_both_splits(subtask):
    trained = [x for seed in range(3) for x in embedded.examples(subtask, "train", 300, seed)]
    held_out = embedded.examples(subtask, "heldout", 100)
    assert not {x.turns[0] for x in trained} & {x.turns[0] for x in held_out}
    assert {embedded.split_of(x) for x in trained} == {"train"}
    assert {embedded.split_of(x) for x in held_out} == {"heldout"}
    assert len({x.turns[0] for x in held_out}) == 100


def test_what_is_unknown_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'nope'.*draft-small"):
        embedded.model_path("nope")
    with pytest.raises(ValueError, match=r"'poetry'.*law analytics"):
        embedded.examples("poetry")
    with pytest.raises(ValueError, match=r"'test'.*heldout"):
        embedded.examples("qa", "test")
    with pytest.raises(ValueError, match="turn=1 needs 1"):
        embedded.render_prompt(embedded.examples("multi-turn", n=1)[0], turn=1)


def test_importing_the_corpus_loads_neither_torch_nor_transformers():
    assert alone("print({'torch', 'transformers'} & set(sys.modules))").strip() == "set()"


# Prompts


@pytest.mark.parametrize("length", [256, 512, 40])
@pytest.mark.parametrize("encoder", [False, True])
def test_prompts_have_exactly_the_wanted_length(tokenizer, length, encoder):
    for subtask in embedded.SUBTASKS:
        example = embedded.examples(subtask, n=1)[0]
        ids = embedded.prompt_ids(tokenizer, example, length, encoder=encoder)
        plain = embedded.prompt_ids(tokenizer, example, encoder=encoder)
        assert len(ids) == length and ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id
        kept = min(length, len(plain)) - 1
        assert ids[-kept:] == plain[-kept:]
        assert ids == embedded.prompt_ids(tokenizer, example, length, encoder=encoder)


def test_rendered_text_tokenizes_to_the_prompt_and_matches_the_chat_template(tokenizer):
    example = embedded.examples("multi-turn", n=1)[0]
    text = embedded.render_prompt(example, 1, example.references)
    ids = tokenizer(text)["input_ids"]
    assert ids == embedded.prompt_ids(tokenizer, example, turn=1, previous_answers=example.references)
    messages = [
        {"role": "user", "content": example.turns[0]},
        {"role": "assistant", "content": example.references[0]},
        {"role": "user", "content": example.turns[1]},
    ]
    templated = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert templated["input_ids"] == ids and tokenizer.decode(ids) == tokenizer.bos_token + text


# The models


def test_models_are_small_enough_and_drafts_much_smaller(models):
    sizes = [path.stat().st_size for path in embedded.MODELS_DIR.rglob("*.safetensors")]
    assert len(sizes) == 6 and sum(sizes) <= 24e6
    layers = {
        name: sum(p.numel() for key, p in model.named_parameters() if ".layers." in key or ".block." in key)
        for name, model in models.items()
    }
    assert layers["target"] >= 8 * layers["draft"] and layers["t5-target"] >= 8 * layers["t5-draft"]
    assert layers["draft-small"] < layers["draft"] < layers["draft-large"] < layers["target"]


def test_models_share_the_tokenizer_and_its_special_ids(models, tokenizer):
    for name, model in models.items():
        other = AutoTokenizer.from_pretrained(embedded.model_path(name))
        assert other.get_vocab() == tokenizer.get_vocab() and other.padding_side == "left"
        config = model.generation_config
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
        assert (other.pad_token_id, other.bos_token_id, other.eos_token_id) == (0, 1, 2)


def answers(model, tokenizer, examples, **speculation):
    """A model's greedy answers to first turns, with the statistics of speculation."""
    encoder = model.config.is_encoder_decoder
    prompts = [torch.tensor(embedded.prompt_ids(tokenizer, example, encoder=encoder)) for example in examples]
    ids = pad_sequence(prompts, batch_first=True, padding_value=tokenizer.pad_token_id, padding_side="left")
    with hf_specdec.enable(model):
        out = model.generate(
            input_ids=ids, attention_mask=ids.ne(tokenizer.pad_token_id).long(), max_new_tokens=96, do_sample=False,
            return_dict_in_generate=True, **speculation,
        )  # fmt: skip
    new = out.sequences[:, 1 if encoder else ids.shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True), getattr(out, "speculation", None)


@pytest.mark.parametrize(("target", "draft", "subtasks"), [("target", "draft", 6), ("t5-target", "t5-draft", 5)])
def test_the_target_is_ahead_of_its_draft_which_it_often_agrees_with(models, tokenizer, target, draft, subtasks):
    """By their share of right statements: 50 or more, and ten points ahead, on so many subtasks."""
    chosen = [x for subtask in embedded.SUBTASKS for x in embedded.examples(subtask, "heldout", n=12, seed=1)]
    speculating = {"generation_strategy": "speculative", "assistant_model": models[draft], "num_assistant_tokens": 4}
    texts, stats = answers(models[target], tokenizer, chosen, **speculating)
    found = {}
    for name, said in ((target, texts), (draft, answers(models[draft], tokenizer, chosen)[0])):
        scores = [
            quality.facts(text.strip(), example.references[:1]) for text, example in zip(said, chosen, strict=True)
        ]
        found[name] = [mean(scores[at : at + 12]) for at in range(0, len(scores), 12)]
    leads = [lead - score for lead, score in zip(found[target], found[draft], strict=True)]
    assert sum(lead >= 10 for lead in leads) >= subtasks, leads
    assert min(leads) >= 0, leads
    assert sum(score >= 50 for score in found[target]) >= subtasks, found
    assert 0.6 <= stats.acceptance_rate <= 0.8


# The trainer


def test_whole_rows_hold_no_answer_without_its_text(tokenizer):
    """From `<bos>` on, whole dialogues and nothing else; the loss is on their answers. Packed rows are cut."""

    def are_whole(make):
        batch = make(tokenizer, Random(0), 8, 256, embedded.SUBTASKS, 0.0)
        known = {tokenizer.eos_token_id, tokenizer.pad_token_id}
        texts = [tokenizer.decode(ids) for ids in batch.inputs["input_ids"]]
        for labels, weights in zip(batch.labels, batch.weights, strict=True):
            assert not weights[labels == tokenizer.pad_token_id].any()
        begins = all(text.startswith(f"{tokenizer.bos_token}<|user|>") for text in texts)
        return begins and all(int(labels[-1]) in known for labels in batch.labels)

    assert are_whole(whole_batch) and not are_whole(packed_batch)


def test_t5_reads_whole_questions_also_behind_solved_examples(tokenizer):
    """Same batch for the same step, whatever was drawn in between; the last turn is a question."""
    draw = partial(batch_for_step, tokenizer, encoder_decoder=True, rows=4, seed=0, few_shot=True)
    batches = [draw(step=step) for step in range(4)]
    draw(step=9)
    for step, batch in enumerate(batches):
        sources, answers = batch.inputs["input_ids"], batch.labels
        assert torch.equal(sources, draw(step=step).inputs["input_ids"])
        assert torch.equal(batch.inputs["decoder_input_ids"][:, 1:], answers[:, :-1])
        for source, answer, weights in zip(sources, answers, batch.weights, strict=True):
            question = tokenizer.decode(source).rpartition("<|user|>")[2]
            assert question and "<|assistant|>" not in question
            assert answer[weights > 0][-1] == tokenizer.eos_token_id
    widths = [batch.inputs["input_ids"].shape[1] for batch in batches]
    assert max(widths[:3]) < 160 <= widths[3]


@pytest.mark.parametrize("killed_in", ["micro-seedling", "micro"])
@pytest.mark.parametrize("encoder_layers", [0, 1])
def test_a_killed_training_resumes_to_the_same_weights(tokenizer, tmp_path, encoder_layers, killed_in):
    shape = dataclasses.replace(MICRO, encoder_layers=encoder_layers)
    seedling = Recipe(shape, steps=2, rows=1, warmup=2, checkpoint_every=1, decay=0.0)
    recipe = Recipe(dataclasses.replace(shape, layers=2), steps=2, rows=1, warmup=2, seed=1, seedling=seedling)
    whole, record = train("micro", recipe, tokenizer, tmp_path / "whole")
    train("micro-seedling", seedling, tokenizer, tmp_path / "killed", stop_after=1)
    if killed_in == "micro":
        train("micro", recipe, tokenizer, tmp_path / "killed", stop_after=1)
    resumed, its_record = train("micro", recipe, tokenizer, tmp_path / "killed")
    assert its_record["steps"] == record["steps"] == 2 and its_record["tokens"] == record["tokens"]
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


@pytest.mark.parametrize("encoder_layers", [0, 1])
def test_a_grown_model_computes_what_its_seedling_did(encoder_layers):
    shallow = build(dataclasses.replace(MICRO, layers=2, encoder_layers=encoder_layers), seed=0).eval()
    deep = build(dataclasses.replace(MICRO, layers=6, encoder_layers=2 * encoder_layers), seed=1).eval()
    ids = torch.arange(10, 40).view(2, 15)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if encoder_layers else {})
    wanted = shallow(**inputs).logits
    assert not torch.allclose(deep(**inputs).logits, wanted, atol=1e-3)
    grow(shallow, deep)
    assert torch.allclose(deep(**inputs).logits, wanted, atol=1e-5)


def test_a_checkpoint_of_another_recipe_is_refused(tokenizer, tmp_path):
    recipe = Recipe(MICRO, steps=1, rows=1)
    train("micro", recipe, tokenizer, tmp_path)
    with pytest.raises(ValueError, match="another recipe"):
        train("micro", dataclasses.replace(recipe, seed=1), tokenizer, tmp_path)
