"""llama.cpp as contenders of the task `engines`: the pair's own weights, plain and with its draft."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specdec.bench.models.loading import LoadedPair, gguf_path
from hf_specdec.bench.models.names import is_gguf
from hf_specdec.bench.records import Method, Rounds
from hf_specdec.bench.running.methods import Contender
from hf_specdec.bench.running.rounds import counted_round, summary
from hf_specdec.bench.settings import BenchError, Settings

if TYPE_CHECKING:
    from hf_specdec.bench.running.llama_cpp import Copies, Decoded, Rows

KIND = "llama.cpp"
FILE = "llama.cpp-gguf"  # uses the target's GGUF file itself
# One engine per storage of the weights.
LLAMA_CPP_ENGINES = {"llama.cpp-f32": "f32", "llama.cpp-bf16": "bf16", "llama.cpp-q8_0": "q8_0", FILE: "gguf"}


class _Pair:
    """A pair (or a GGUF file that drafts by copying) loaded by llama.cpp, and the output of its last call."""

    def __init__(self, pair: LoadedPair, weights: str):
        self.draft: Rows | Copies | None
        if weights == LLAMA_CPP_ENGINES[FILE]:
            from hf_specdec.bench.running.llama_cpp import Copies, Rows

            self.target = Rows(gguf_path(pair.target_name), weights, torch.get_num_threads())
            self.draft = Copies()
        else:
            self.target = _loaded(pair.target, weights)
            self.draft = None if pair.draft is None else _loaded(pair.draft, weights)
        self.last: Decoded | None = None

    def generate(
        self, lookahead: int | None, input_ids: Tensor, max_new_tokens: int, streamer: BaseStreamer, **_: Any
    ) -> Tensor:
        """Decode greedily like generate(): `[B, P + max_new_tokens]`; without a lookahead plain decoding."""
        from hf_specdec.bench.running import llama_cpp

        def delivered(tokens: list[list[int]]) -> None:
            streamer.put(torch.tensor([token for row in tokens for token in row]))

        streamer.put(input_ids)
        prompts = input_ids.tolist()
        if lookahead is None:
            self.last = llama_cpp.decode(self.target, prompts, max_new_tokens, delivered)
        else:
            assert self.draft is not None
            self.last = llama_cpp.decode_with_draft(
                self.target, self.draft, prompts, max_new_tokens, lookahead, delivered
            )
        return torch.cat([input_ids, torch.tensor(self.last.tokens)], dim=1)

    def read_rounds(self, pair: LoadedPair, tokens: list[list[int]], puts: Sequence[int], log: Any) -> Rounds | None:
        """The rounds of the last call."""
        done = self.last
        if done is None or not done.drafted:
            return None
        rounds = zip(done.drafted, done.accepted, done.new_tokens, strict=True)
        return summary(
            [counted_round(drafted, kept, new, max(drafted), max(drafted) + 1) for drafted, kept, new in rounds]
        )


def check_llama_cpp(settings: Settings) -> None:
    """Raise `BenchError` if llama.cpp is requested and its packages are not installed."""
    asked = [engine for engine in settings.engines if engine in LLAMA_CPP_ENGINES]
    missing = [name for name in ("llama_cpp", "gguf") if asked and importlib.util.find_spec(name) is None]
    if missing:
        raise BenchError(
            f"--engines: {asked[0]!r} needs {' and '.join(missing)}, not installed here; "
            "pip install 'hf_specdec[llama-cpp]'"
        )


def llama_cpp_refusal(settings: Settings, pair: LoadedPair) -> str | None:
    """A sentence on why llama.cpp cannot take part though `engines` names it; None if it can."""
    if not set(settings.engines) & set(LLAMA_CPP_ENGINES):
        return None
    from hf_specdec.bench.models.gguf_export import export_refusal

    if settings.sampling:
        return "llama.cpp is left out: it is compared in greedy decoding only."
    if any(model.device.type != "cpu" for model in pair.models):
        return "llama.cpp is left out: it is compared on a CPU only."
    if processors := pair.describe()["target"].processors:
        return f"llama.cpp is left out: it does not apply the target's processors ({', '.join(processors)})."
    if FILE in settings.engines:
        return None if is_gguf(pair.target_name) else f"{FILE} is left out: the target is not a GGUF file."
    return next((refusal for model in pair.models if (refusal := export_refusal(model))), None)


def llama_cpp_methods(pair: LoadedPair, engine: str, lookaheads: Sequence[int]) -> list[Contender]:
    """Plain decoding (`role` plain), and speculative decoding at each lookahead (`role` fixed).

    The models are written and loaded here, outside of any timed call.
    """
    loaded = _Pair(pair, LLAMA_CPP_ENGINES[engine])
    name = f"none {engine}"
    plain = Method(name, f"plain, {engine}", KIND, engine, same_engine=name, role="plain")
    found = [Contender(plain, pair, generate=partial(loaded.generate, None))]
    for tokens in lookaheads if loaded.draft is not None else ():
        title, by = f"speculative, γ = {tokens}, {engine}", pair.draft_name
        size = None if pair.draft is None else pair.draft.num_parameters()
        if engine == FILE:
            title, by, size = f"prompt look-up, γ = {tokens}, {engine}", "copies", None
        drafting = Method(title, title, KIND, engine, tokens, name, by, size, role="fixed")
        call = partial(loaded.generate, tokens)
        found.append(Contender(drafting, pair, tokens, generate=call, read_rounds=loaded.read_rounds))
    return found


def _loaded(model: PreTrainedModel, weights: str) -> Rows:
    from hf_specdec.bench.models.gguf_export import write_gguf
    from hf_specdec.bench.running.llama_cpp import Rows

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(model, path, weights)
        # The mapped file stays readable after it is deleted.
        return Rows(path, weights, torch.get_num_threads())
