"""Methods, their order and what each leaves behind; prompts and names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.tiny_pair import VOCABULARY, save_pair

from hf_specdec import embedded
from hf_specdec.bench.inputs.prompts import benchmark_prompts, decode_prompts
from hf_specdec.bench.models.known_pairs import KNOWN_PAIRS, default_draft, full_name
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.running.methods import (
    assisted_refusal,
    lookahead,
    methods_for,
    plain,
    strategy,
    transformers_assisted,
)
from hf_specdec.bench.running.timed_call import TimingStreamer, interleaved, run_once
from hf_specdec.bench.settings import BenchError, Settings


def settings_for(folder: Path, encoder_decoder: bool = False) -> Settings:
    target, draft = save_pair(folder, encoder_decoder)
    return Settings(model_name=str(target), assistant_model=str(draft), assisted_generation=True, max_new_tokens=7)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return settings_for(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def pair(settings: Settings) -> LoadedPair:
    return load_pair(settings)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, LoadedPair]:
    settings = settings_for(tmp_path_factory.mktemp("t5"), encoder_decoder=True)
    return settings, load_pair(settings)


def test_prompts_have_exactly_the_lengths_asked_for(pair: LoadedPair, t5: tuple[Settings, LoadedPair]) -> None:
    for loaded in (pair, t5[1]):
        prompts = benchmark_prompts(loaded, (33, 90), 3, new_tokens=5)
        assert [len(prompt.token_ids) for prompt in prompts] == [33] * 3 + [90] * 3
        assert [prompt.index for prompt in prompts] == list(range(6))
        assert len({prompt.token_ids for prompt in prompts}) == 6


def test_chat_template_goes_around_the_text(pair: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    monkeypatch.setattr(pair.tokenizer, "chat_template", template)
    (prompt,) = benchmark_prompts(pair, (100,), 1, new_tokens=5)
    text = "".join(pair.tokenizer.convert_ids_to_tokens(list(prompt.token_ids)))
    assert len(prompt.token_ids) == 100 and text.startswith("[") and text.endswith("]>")


def test_lengths_that_do_not_fit_are_refused(pair: LoadedPair) -> None:
    with pytest.raises(BenchError, match=r"--prompt_lengths: 196 tokens and --max_new_tokens 5 .* 200 tokens"):
        benchmark_prompts(pair, (196,), 1, new_tokens=5)
    benchmark_prompts(pair, (195,), 1, new_tokens=5)


def test_decode_prompts_are_cut_on_the_left_and_that_is_said(pair: LoadedPair) -> None:
    text = "word " * 300
    (prompt,), notes = decode_prompts(pair, [text], new_tokens=10)
    assert list(prompt.token_ids) == pair.tokenizer(text).input_ids[-190:]
    assert len(notes) == 1 and "cut on the left" in notes[0]
    built_in, _ = decode_prompts(pair, [], new_tokens=10)
    assert [prompt.label for prompt in built_in] == list(embedded.SUBTASKS)


def test_every_method_counts_the_same_tokens(
    settings: Settings, pair: LoadedPair, t5: tuple[Settings, LoadedPair]
) -> None:
    for asked, loaded in ((settings, pair), t5):
        (prompt,) = benchmark_prompts(loaded, (40,), 1, asked.max_new_tokens)
        runs = {method.name: run_once(loaded, method, prompt, asked) for method in methods_for(asked, loaded)}
        assert set(runs) == {"plain", "speculative", "assisted"}
        for run in runs.values():
            assert run.tokens == runs["plain"].tokens
            assert sum(count for _, count in run.puts) == len(run.tokens)
            assert all(0 < at <= run.seconds for at, _ in run.puts)
            if run.rounds is not None:
                assert sum(item["new_tokens"] for item in run.rounds) == len(run.tokens)


def test_bild_runs_with_its_thresholds(settings: Settings, pair: LoadedPair) -> None:
    method = strategy(Settings(**vars(settings) | {"generation_strategy": "bild", "fallback_threshold": 0.0}), pair)
    (prompt,) = benchmark_prompts(pair, (40,), 1, settings.max_new_tokens)
    run = run_once(pair, method, prompt, settings)
    assert method.name == "bild" and "fallback 0, rollback 3" in method.title
    # Fallback 0 never falls back, so only the end of the output shortens a draft.
    assert run.rounds is not None and run.rounds[0]["drafted"] == 4


def test_assisted_baseline_is_constant_and_leaves_the_draft_as_it_was(settings: Settings, pair: LoadedPair) -> None:
    assert pair.draft is not None
    before = pair.draft.generation_config
    (prompt,) = benchmark_prompts(pair, (40,), 1, 30)
    longer = Settings(**vars(settings) | {"max_new_tokens": 30})
    run = run_once(pair, transformers_assisted(longer, pair), prompt, longer)
    assert pair.draft.generation_config is before and "generate" not in vars(pair.draft)
    assert before.num_assistant_tokens is None
    assert run.rounds is not None
    left = 30
    for item in run.rounds:
        # The whole lookahead, unless the end is nearer; a draft may stop at EOS, which does not occur here.
        assert item["drafted"] == min(4, left - 1)
        left -= item["new_tokens"]
    assert left == 0


def test_an_accepted_eos_counts_as_accepted_in_transformers_loop_as_in_ours(settings: Settings) -> None:
    pair = load_pair(settings)
    assert pair.draft is not None
    (prompt,) = benchmark_prompts(pair, (40,), 1, 30)
    longer = Settings(**vars(settings) | {"max_new_tokens": 30})
    tokens = run_once(pair, plain(), prompt, longer).tokens
    agreed = 0
    # Whichever token ends the text: where the target reaches it in a draft, it was accepted.
    for eos in sorted(set(tokens)):
        for model in pair.models:
            model.generation_config.eos_token_id = eos
        ours, theirs = (
            run_once(pair, method(longer, pair), prompt, longer).rounds for method in (strategy, transformers_assisted)
        )
        assert ours is not None and theirs is not None
        for name in ("drafted", "accepted", "new_tokens", "overlap"):
            assert [item[name] for item in ours] == [item[name] for item in theirs]
        agreed += ours[-1]["accepted"] == ours[-1]["new_tokens"]
    assert agreed > 0, "the case in question occurred"


def test_vocabularies_of_two_sizes(tmp_path: Path) -> None:
    asked = settings_for(tmp_path)
    pair = load_pair(asked)
    assert pair.draft is not None
    pair.draft.resize_token_embeddings(VOCABULARY + 8)
    head = pair.draft.get_output_embeddings()
    (prompt,) = benchmark_prompts(pair, (40,), 1, asked.max_new_tokens)
    greedy = methods_for(asked, pair)
    assert [method.name for method in greedy] == ["plain", "speculative", "assisted"]
    runs = [run_once(pair, method, prompt, asked) for method in greedy]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    # In sampling transformers would replace the head of the draft, which ours needs next.
    drawn = Settings(**vars(asked) | {"do_sample": True})
    assert [method.name for method in methods_for(drawn, pair)] == ["plain", "speculative"]
    assert "left out" in (assisted_refusal(drawn, pair) or "")
    run_once(pair, methods_for(drawn, pair)[1], prompt, drawn)
    assert pair.draft.get_output_embeddings() is head


def test_lookahead_defaults(settings: Settings, pair: LoadedPair, t5: tuple[Settings, LoadedPair]) -> None:
    assert lookahead(settings, pair) == 4
    assert lookahead(*t5) == 7
    assert lookahead(Settings(num_assistant_tokens=2), t5[1]) == 2


def test_sampling_depends_on_seed_and_example_only(settings: Settings, pair: LoadedPair) -> None:
    drawn = Settings(**vars(settings) | {"do_sample": True, "max_new_tokens": 12})
    first, second = benchmark_prompts(pair, (40,), 2, 12)
    runs = [run_once(pair, plain(), prompt, drawn).tokens for prompt in (first, second, first)]
    assert runs[0] == runs[2]
    other = Settings(**vars(drawn) | {"seed": 7})
    assert run_once(pair, plain(), first, other).tokens != runs[0]


def test_methods_take_turns(settings: Settings, pair: LoadedPair) -> None:
    prompts, methods = benchmark_prompts(pair, (40,), 3, 7), methods_for(settings, pair)
    order = list(interleaved(prompts, methods, repeats=2))
    assert len(order) == 18
    for start in range(0, 18, 3):
        block = order[start : start + 3]
        assert len({(repeat, prompt.index) for repeat, prompt, _ in block}) == 1
        assert {method.name for *_, method in block} == {"plain", "speculative", "assisted"}
    assert set(Counter(method.name for *_, method in order[::3]).values()) == {2}


def test_streamer_notes_puts_after_the_prompt_and_passes_all_on() -> None:
    inner = TimingStreamer()
    streamer = TimingStreamer(inner)
    for value in (torch.ones(1, 9), torch.ones(1), torch.ones(1, 3)):
        streamer.put(value)
    streamer.end()
    assert streamer.counts == inner.counts == [1, 3]
    assert streamer.times == sorted(streamer.times)


@pytest.mark.parametrize(
    ("short", "full", "draft"),
    [
        ("Qwen1.5-7B-Chat", "Qwen/Qwen1.5-7B-Chat", "Qwen/Qwen1.5-0.5B-Chat"),
        ("opt-6.7b", "facebook/opt-6.7b", "facebook/opt-125m"),
        ("OPT-6.7B", "facebook/opt-6.7b", "facebook/opt-125m"),
        ("vicuna-7b-v1.3", "lmsys/vicuna-7b-v1.3", "double7/vicuna-68m"),
        ("bloom-7b1", "bigscience/bloom-7b1", "bigscience/bloom-560m"),
        ("Llama-2-7b", "meta-llama/Llama-2-7b-hf", "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"),
        ("t5-base", "google-t5/t5-base", "google-t5/t5-small"),
        (
            "japanese-gpt-neox-409M-xlsum-sft",
            "u-hyszk/japanese-gpt-neox-409M-xlsum-sft",
            "u-hyszk/japanese-gpt-neox-47M-xlsum-sft",
        ),
        ("target", "target", "draft"),
        ("t5-target", "t5-target", "t5-draft"),
        ("someone/else", "someone/else", None),
        ("unheard-of", "unheard-of", None),
    ],
)
def test_short_names(short: str, full: str, draft: str | None) -> None:
    assert full_name(short) == full
    assert default_draft(short) == draft
    assert default_draft(full) == draft


def test_every_known_draft_has_a_short_name() -> None:
    for known in KNOWN_PAIRS:
        for name in known.drafts:
            assert full_name(name.rsplit("/", 1)[-1]) == name
    assert full_name("Tiny-Vicuna-1B") == "Jiayi-Pan/Tiny-Vicuna-1B"
    assert full_name("TinyLlama-1.1B").startswith("TinyLlama/TinyLlama-1.1B")


def test_drafts_of_another_kind_are_refused(tmp_path: Path, settings: Settings) -> None:
    _, t5_draft = save_pair(tmp_path, encoder_decoder=True)
    mixed = Settings(**vars(settings) | {"assistant_model": str(t5_draft)})
    with pytest.raises(BenchError, match=r"--assistant_model: .* only one is an encoder-decoder model"):
        load_pair(mixed)
