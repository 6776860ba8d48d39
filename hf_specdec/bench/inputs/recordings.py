"""Turns prompts into inputs of `generate()`: padded tokens, or the features of recordings."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.settings import BenchError


def read_wave(path: str, rate: int, longest: float) -> np.ndarray:
    """Read a recording's samples `[N]`, from -1 to 1.

    Args:
        rate: the required samples per second.
        longest: the maximum length in seconds.

    Raises:
        BenchError: the file cannot be read, has another format, or is too long.
    """
    form = f"a WAV file of one channel, 16 bits and {rate} samples per second, at most {longest:g} s long"
    try:
        with wave.open(path, "rb") as file:
            found = file.getnchannels(), 8 * file.getsampwidth(), file.getframerate()
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2" if found[1] == 16 else "<u1")
    except (OSError, EOFError, wave.Error) as error:
        raise BenchError(f"--dataset: the recording {path!r} can't be read ({error}); give {form}") from error
    if found != (1, 16, rate) or not 0 < len(samples) <= longest * rate:
        channels, bits, own = found
        raise BenchError(
            f"--dataset: the recording {path!r} has {channels} channels, {bits} bits, {own} samples per second and "
            f"{len(samples) / channels / own:.1f} s; give {form}"
        )
    return samples.astype(np.float32) / 2**15


def model_inputs(pair: LoadedPair, prompts: Sequence[Prompt], model: PreTrainedModel) -> dict[str, Tensor]:
    """Features `[B, …]` of recordings, or ids and mask `[B, P]` of texts, padded on the left (encoders: right).

    Args:
        model: the pair's model that gives device and dtype.

    Raises:
        BenchError: see `read_wave`.
    """
    if (extractor := pair.extractor) is not None:
        sounds = [read_wave(str(one.recording), extractor.sampling_rate, extractor.chunk_length) for one in prompts]
        features: Any = extractor(sounds, sampling_rate=extractor.sampling_rate, return_tensors="pt").input_features
        return {"input_features": features.to(model.device, model.dtype)}
    side = "right" if pair.encoder_decoder else "left"
    rows = [torch.tensor(prompt.token_ids, device=model.device) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_token(pair) or 0, padding_side=side)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return {"input_ids": ids, "attention_mask": mask}


def pad_token(pair: LoadedPair) -> int | None:
    """The tokenizer's padding token, or its EOS token if it has none."""
    if pair.tokenizer.pad_token_id is not None:
        return int(pair.tokenizer.pad_token_id)
    stored = pair.tokenizer.eos_token_id
    return None if stored is None else int(stored)
