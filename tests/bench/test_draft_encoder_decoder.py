"""The task `draft` for encoder-decoder targets: fewer decoder layers over the target's own encoding."""

import json
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import models
from helpers.generating_classes import small_pair
from helpers.identity import speculated
from helpers.tiny_pair import save_pair
from helpers.tiny_whisper import BEGIN, FRAMES, NO_TIMES, RATE, feature_extractor, tokenizer, whisper
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, BartForConditionalGeneration, PreTrainedModel

import hf_specdec
from hf_specdec.bench.aligning.answers import target_answers
from hf_specdec.bench.aligning.batches import IGNORED, Collator, answer_logits
from hf_specdec.bench.aligning.encoding_keys import EncodingKeys
from hf_specdec.bench.aligning.shape import check_target, cut_draft, layer_changes
from hf_specdec.bench.aligning.trimmed import TrimmedVocabulary
from hf_specdec.bench.inputs.questions import dialogues
from hf_specdec.bench.inputs.recordings import read_wave
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.results import load
from hf_specdec.bench.running.measuring import batches
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import run_task

TARGETS: dict[str, Callable[[], PreTrainedModel]] = {
    "T5": lambda: models.t5(num_layers=4),
    "Whisper": lambda: whisper(decoder_layers=4),
}
TOKENS = list(range(0, models.VOCABULARY, 2))


def call(target: PreTrainedModel) -> dict[str, Any]:
    """Greedy, of two rows."""
    torch.manual_seed(1)
    features = {"input_features": torch.randn(2, 8, FRAMES, dtype=torch.float64)}
    inputs = features if target.config.model_type == "whisper" else models.encoder_prompts(2)
    return {**inputs, "do_sample": False, "max_new_tokens": 16}


def logits(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    read = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    ids = torch.randint(2, models.VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
    return model(**read, decoder_input_ids=ids).logits


def record(path: Path, seed: int, seconds: float = 1.5, rate: int = RATE) -> str:
    noise = np.random.default_rng(seed).integers(-(2**14), 2**14, int(seconds * rate), dtype=np.int16)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(noise.tobytes())
    return str(path)


def saved_target(kind: str, folder: Path) -> Path:
    if kind == "T5":
        return save_pair(folder / "t5", encoder_decoder=True)[0]
    path = folder / "whisper"
    whisper().float().save_pretrained(path)
    tokenizer().save_pretrained(path)
    feature_extractor().save_pretrained(path)
    return path


def settings_for(kind: str, folder: Path, **more: Any) -> Settings:
    """A data set of six texts or recordings, in a folder with a target."""
    asked = [
        f"translate {'more ' * n}" if kind == "T5" else record(folder / f"{n}.wav", n, seconds=1 + n / 10)
        for n in range(6)
    ]
    (folder / "asked.jsonl").write_text("".join(json.dumps({"q": one}) + "\n" for one in asked))
    settings = Settings(
        task="draft", model_name=str(saved_target(kind, folder)), assisted_generation=True, loss="lk_hybrid",
        dataset=str(folder / "asked.jsonl"), prompt_column="q", top_k_targets=8, minutes=0.5, compile=True,
        output_dir=folder / "runs", max_new_tokens=8, batch_sizes=(4,), num_assistant_tokens=3, layers=(0, 1),
    )  # fmt: skip
    return replace(settings, **more)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_draft_has_the_layers_of_the_decoder(kind: str) -> None:
    """All of them are the target; fewer are not. The encoder stays whole."""
    target = TARGETS[kind]()
    check_target(LoadedPair("x", target, None))  # type: ignore[arg-type]
    inputs = call(target)
    everything, cut = (cut_draft(target, layers, TOKENS) for layers in (range(4), (0, 3)))
    torch.testing.assert_close(logits(everything, inputs), logits(target, inputs))
    assert not torch.allclose(logits(cut, inputs), logits(target, inputs))
    own, its = (model.get_encoder().state_dict() for model in (target, cut))
    assert own.keys() == its.keys() and all(torch.equal(own[name], its[name]) for name in own)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_draft_reads_the_target_s_encoding(kind: str, tmp_path) -> None:
    """After saving and loading, too; a draft that does not say so runs its own encoder. Both keep the output."""
    target = TARGETS[kind]()
    cut_draft(target, (0, 3), TOKENS).save_pretrained(tmp_path)
    auto = AutoModelForSeq2SeqLM if kind == "T5" else AutoModelForSpeechSeq2Seq
    draft = auto.from_pretrained(tmp_path).eval()
    expected = target.generate(**call(target))
    for shares, passes in ((True, 0), (False, 1)):
        draft.config.draft_shares_encoder = shares
        with models.Passes(draft.get_encoder()) as encoder:
            assert torch.equal(speculated(target, draft, **call(target)), expected)
        assert encoder.count == passes and hf_specdec.last_speculation(target).drafted > 0
    with hf_specdec.trim_draft_head(draft):
        assert torch.equal(speculated(target, draft, **call(target)), expected)
    if kind == "T5":  # transformers' own loop takes one row
        given = {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in call(target).items()}
        assert torch.equal(target.generate(**given, assistant_model=draft), target.generate(**given))


def test_a_bias_of_the_logits_is_trimmed_with_the_head() -> None:
    """As BART, Pegasus and Marian have it."""
    target, _ = small_pair(BartForConditionalGeneration, torch.float64)
    target.final_logits_bias.normal_()
    ids = torch.tensor([[3, 5, 7]])
    cut = cut_draft(target, (0, 1), [2, 3, 9])
    trimmed, expected = TrimmedVocabulary.of(cut), target(input_ids=ids, decoder_input_ids=ids).logits
    torch.testing.assert_close(cut(input_ids=ids, decoder_input_ids=ids).logits, expected[..., [2, 3, 9]])
    trimmed.restore()
    torch.testing.assert_close(cut(input_ids=ids, decoder_input_ids=ids).logits, expected)


def answered(kind: str, folder: Path) -> tuple[LoadedPair, list[dict[str, Any]]]:
    """The target, and its answers with their encodings."""
    settings = settings_for(kind, folder)
    pair = load_pair(settings)
    groups = batches(dialogues(settings), 4)
    return pair, list(target_answers(folder / "a", settings, pair, groups, Processes(), plain(pair)))


@pytest.mark.parametrize("kind", TARGETS)
def test_answers_are_learned_from_over_their_encodings(kind: str, tmp_path) -> None:
    """Logits at the answers' tokens are those that wrote them, and the list's alone with a trimmed head."""
    pair, rows = answered(kind, tmp_path)
    expected = [BEGIN, NO_TIMES] if kind == "Whisper" else [0]
    assert [row["start"] for row in rows] == [expected] * 6
    batch = Collator(pair)(rows)
    assert batch["labels"].shape == batch["decoder_input_ids"].shape and "input_ids" not in batch
    assert int((batch["labels"] != IGNORED).sum()) == sum(len(row["answer"]) for row in rows)
    with torch.no_grad():
        found = answer_logits(pair.target, batch)
        log_probs = found.log_softmax(-1).gather(-1, batch["target_tokens"])
    torch.testing.assert_close(log_probs, batch["target_log_probs"][:, :-1].to(log_probs), atol=0.02, rtol=0.02)
    assert len(layer_changes(pair.target, batch)) == 1
    cut = cut_draft(pair.target, (0, 1), TOKENS)
    trimmed = TrimmedVocabulary.of(cut)
    torch.testing.assert_close(answer_logits(cut, batch), found[:, TOKENS])
    trained = [name for name, weight in cut.named_parameters() if weight.requires_grad]
    assert trained and not any("encoder.block" in name or "encoder.layers" in name for name in trained)
    trimmed.restore()
    torch.testing.assert_close(answer_logits(cut, batch), found)


@pytest.mark.parametrize("kind", TARGETS)
def test_keys_and_values_of_an_encoding_are_computed_once(kind: str, tmp_path) -> None:
    """Also if its row is padded to another length. They are not trained."""
    pair, rows = answered(kind, tmp_path)
    draft = cut_draft(pair.target, (0, 1), TOKENS)
    with torch.no_grad():
        expected = [answer_logits(draft, Collator(pair)([row])) for row in rows]
        keys = EncodingKeys(draft)
        assert len(keys.projections) == 4 and not any(one.weight.requires_grad for one in keys.projections)
        for some in (rows[:2], rows[::-1]):
            keys.read(batch := Collator(pair)(some))
            answer_logits(draft, batch)
        for projection in keys.projections:
            projection.weight.zero_()
        for row, logits in zip(rows, expected, strict=True):
            keys.read(batch := Collator(pair)([row]))
            torch.testing.assert_close(answer_logits(draft, batch), logits, atol=0.02, rtol=0.02)
        keys.restore()
        assert not torch.allclose(answer_logits(draft, batch), logits, atol=0.02), "the negative control"


@pytest.mark.usefixtures("a_second_each_look")
@pytest.mark.parametrize("kind", TARGETS)
def test_a_draft_is_made_trained_judged_and_saved(kind: str, tmp_path, capsys) -> None:
    settings = settings_for(kind, tmp_path, layers=())
    run_task(settings)
    (path,) = settings.output_dir.glob("draft-*.json.gz")
    result, printed = load(path), capsys.readouterr().out
    facts = result.training
    assert facts is not None and facts.saved is not None and facts.tokens_read > 0
    name = "T5ForConditionalGeneration" if kind == "T5" else "WhisperForConditionalGeneration"
    assert f'{name}.from_pretrained("{facts.saved}")' in printed
    auto = AutoModelForSeq2SeqLM if kind == "T5" else AutoModelForSpeechSeq2Seq
    saved, own = (auto.from_pretrained(path) for path in (facts.saved, settings.model_name))
    its, targets = (model.get_encoder().state_dict() for model in (saved, own))
    assert all(torch.equal(its[name], targets[name]) for name in targets), "the encoder is the target's"
    changed = [
        name for name, one in saved.get_decoder().named_parameters() if "norm" in name and bool((one != 1).any())
    ]
    assert changed and saved.config.draft_shares_encoder
    outputs = {(one.prompts, one.method): one.outputs for one in result.calls}
    assert all(found == outputs[prompts, "plain"] for (prompts, _), found in outputs.items()), "the target's own"


@pytest.mark.parametrize(("kind", "more", "words"), [
    ("Whisper", {"dataset": "own"}, "writes no prompts of its own; give some"),
    ("T5", {"layers": (1,)}, "--layers: the first of them has to be 0"),
    ("Whisper", {"task": "subtasks"}, "transcribes speech, and all tasks have text prompts"),
])  # fmt: skip
def test_refusals(kind: str, more: dict[str, Any], words: str, tmp_path) -> None:
    with pytest.raises(BenchError, match=words):
        run_task(settings_for(kind, tmp_path, **more))


def test_recordings_of_another_form_are_refused(tmp_path) -> None:
    assert len(read_wave(record(tmp_path / "a.wav", 0), RATE, 2)) == 1500
    with pytest.raises(BenchError, match=r"2.5 s; give a WAV file of one channel, 16 bits and 1000 samples .* 2 s"):
        read_wave(record(tmp_path / "a.wav", 0, 2.5), RATE, 2)
    with pytest.raises(BenchError, match="has 1 channels, 16 bits, 900 samples per second"):
        read_wave(record(tmp_path / "a.wav", 0, rate=900), RATE, 2)
    (tmp_path / "a.wav").write_text("no sound")
    with pytest.raises(BenchError, match="can't be read"):
        read_wave(str(tmp_path / "a.wav"), RATE, 2)
