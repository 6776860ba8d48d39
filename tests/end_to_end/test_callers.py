"""Other libraries that call `generate`: each gets the same output with speculation as without."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from helpers.int8_weights import Int8Weight, quantize
from helpers.models import encoder_prompts, llama, noisy, prompts, t5
from helpers.word_tokenizer import word_tokenizer
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TextIteratorStreamer,
    pipeline,
)
from transformers.cli.serve import Serve

import hf_specdec
from hf_specdec import SpeculationStats, generation, last_speculation

ROOT = Path(__file__).parents[2]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
CHAT = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
MESSAGES = [
    {"role": "w3", "content": "w9 w7 w30"}, {"role": "w4", "content": "w11 w9"}, {"role": "w3", "content": "w5"},
]  # fmt: skip


@pytest.fixture
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = llama()
    return target, noisy(target)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = word_tokenizer()
    made.chat_template = CHAT
    return made


def speculated(
    target: PreTrainedModel, call: Callable[[], Any], draft: PreTrainedModel
) -> tuple[Any, SpeculationStats]:
    """What a call returns with every `generate` of the target speculating, and the statistics of the last."""
    before = last_speculation(target)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative", num_assistant_tokens=3):
        result = call()
    stats = last_speculation(target)
    assert stats is not None and stats is not before, "it decoded plainly"
    assert 0 < stats.acceptance_rate < 1
    return result, stats


def test_a_pipeline_answers_chats_in_a_batch(pair, tokenizer: PreTrainedTokenizerFast) -> None:
    target, draft = pair
    generator = pipeline("text-generation", model=target, tokenizer=tokenizer, device="cpu", batch_size=2)
    chats = [MESSAGES, MESSAGES[:1]]
    plain = generator(chats, **GREEDY)
    answers, stats = speculated(target, lambda: generator(chats, **GREEDY), draft)
    assert answers == plain and [chat[0]["generated_text"][-1]["role"] for chat in answers] == ["assistant"] * 2
    assert len(stats.rounds[0].new_tokens) == 2


def test_the_assistant_of_a_pipeline_drafts(pair, tokenizer: PreTrainedTokenizerFast) -> None:
    """`pipeline(assistant_model=...)` is transformers' own argument, and passes the draft to `generate`."""
    target, draft = pair
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer, device="cpu")(MESSAGES, **GREEDY)
    generator = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft, device="cpu")
    with hf_specdec.enable(target):
        answer = generator(MESSAGES, **GREEDY, generation_strategy="speculative")
    stats = last_speculation(target)
    assert answer == plain and stats is not None and stats.acceptance_rate > 0


def test_a_streamer_is_read_while_another_thread_decodes(pair, tokenizer: PreTrainedTokenizerFast) -> None:
    target, draft = pair
    inputs = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def stream() -> list[str]:
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=600)
        decoding = threading.Thread(target=target.generate, kwargs={**inputs, **GREEDY, "streamer": streamer})
        decoding.start()
        pieces = list(streamer)
        decoding.join()
        return pieces

    plain = stream()
    pieces, _ = speculated(target, stream, draft)
    assert pieces == plain and len([piece for piece in pieces if piece]) == GREEDY["max_new_tokens"]


def test_a_trainer_predicts_between_its_steps(tmp_path) -> None:
    """Weights change between two predictions, so nothing remembered of the first may serve the second."""
    target = t5()
    draft = noisy(target)
    torch.manual_seed(0)
    rows = encoder_prompts(4)
    labels = torch.randint(2, 64, (4, 5))
    data = [
        {"input_ids": ids, "attention_mask": mask, "labels": answer}
        for ids, mask, answer in zip(*rows.values(), labels, strict=True)
    ]
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), predict_with_generate=True, per_device_eval_batch_size=2, max_steps=1,
        learning_rate=0.003, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(target, arguments, train_dataset=data, eval_dataset=data)
    answers = []
    for _ in range(2):
        plain = trainer.predict(data, **GREEDY).predictions
        found, stats = speculated(target, lambda: trainer.predict(data, **GREEDY).predictions, draft)
        assert found.tolist() == plain.tolist() and len(stats.rounds[0].new_tokens) == 2
        answers.append(plain.tolist())
        trainer.train()
    assert answers[0] != answers[1]


@pytest.mark.parametrize(("quantized", "rows"), [("target", 1), ("draft", 3), ("both", 3)])
def test_weights_of_a_tensor_class(pair, quantized: str, rows: int) -> None:
    for name, model in zip(("target", "draft"), pair, strict=True):
        if quantized in (name, "both"):
            quantize(model)
            assert type(model.model.layers[0].mlp.up_proj.weight) is Int8Weight
    target, draft = pair

    def decode() -> torch.Tensor:
        return target.generate(**prompts(rows), **GREEDY)

    plain = decode()
    for _ in range(2):
        assert torch.equal(speculated(target, decode, draft)[0], plain)


def answer(url: str, body: dict[str, Any]) -> str:
    """The whole body of a server's answer to a chat request."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        return response.read().decode()


class ServeOn(Serve):
    """`transformers serve` on a socket that listens already, so that the first request waits for it."""

    def __init__(self, listening: socket.socket, **arguments: Any) -> None:
        self._listening = listening
        super().__init__(device="cpu", log_level="error", non_blocking=True, **arguments)

    def start_server(self) -> None:
        self.server.config.log_level = "error"
        serving = self.server.serve(sockets=[self._listening])
        self._thread = threading.Thread(target=asyncio.run, args=(serving,))
        self._thread.start()


@contextmanager
def served(folder: Path) -> Iterator[Callable[[dict[str, Any]], str]]:
    """A server over loopback; yields what sends a chat request and returns the whole body of the answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = ServeOn(listening, force_model=str(folder))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            yield lambda body: answer(url, body)
        finally:
            server.kill_server()


def test_transformers_serve_streams_a_chat_over_loopback(pair, tokenizer: PreTrainedTokenizerFast, tmp_path) -> None:
    for part in (pair[0], tokenizer):
        part.save_pretrained(tmp_path)
    body = {"model": str(tmp_path), "messages": MESSAGES, "max_tokens": 12}
    with served(tmp_path) as ask:

        def chat() -> tuple[str, str]:
            events = [line.removeprefix("data: ") for line in ask({**body, "stream": True}).splitlines() if line]
            parts = [json.loads(event)["choices"][0]["delta"].get("content") for event in events]
            assert sum(part is not None for part in parts) > 1, "not streamed"
            return "".join(filter(None, parts)), json.loads(ask(body))["choices"][0]["message"]["content"]

        plain = chat()
        with hf_specdec.enable(assistant_model=pair[1], generation_strategy="speculative", num_assistant_tokens=3):
            assert chat() == plain and plain[0].strip() == plain[1].strip() != ""
        (stats,) = (stats for model, stats in generation._last.items() if model.name_or_path == str(tmp_path))
        assert 0 < stats.acceptance_rate < 1


def test_transformers_serve_with_continuous_batching_fails_with_a_reason(pair, tokenizer, tmp_path) -> None:
    """Rather than decode without the draft: no request is answered, and the server's log says why and what to do."""
    for part in (pair[0], tokenizer):
        part.save_pretrained(tmp_path / "target")
    pair[1].save_pretrained(tmp_path / "draft")
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    [script] = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "cli" in code]
    assert "path/of/the/draft" in script
    (tmp_path / "serve.py").write_text(script.replace("path/of/the/draft", str(tmp_path / "draft")))
    options = ["--continuous-batching", "--device", "cpu", "--port", "0"]
    command = [sys.executable, str(tmp_path / "serve.py"), "serve", str(tmp_path / "target"), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        log = []
        for line in server.stdout:
            log.append(line)
            if running := re.search(r"running on (http://\S+)", line):
                break
        else:
            pytest.fail("".join(log))
        body = {"model": str(tmp_path / "target"), "messages": MESSAGES, "max_tokens": 2}
        for stream in (False, True):
            with pytest.raises(HTTPError, match="500"):
                answer(running[1], {**body, "stream": stream})
    finally:
        server.terminate()
        rest = server.communicate(timeout=600)[0]
    reasons = re.findall(r"ValueError: generation_strategy='speculative' with continuous batching.*", rest)
    assert len(reasons) == 2 and all("hf_specdec.disable" in reason for reason in reasons)
