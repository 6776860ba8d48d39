"""A tiny random Whisper: a window of 2 seconds at 1,000 samples a second, read as 20 positions."""

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    PreTrainedModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from helpers.models import noisy

END, BEGIN, NO_TIMES = 256, 257, 258
FIRST_TIME, TIMES = 259, 101
FRAMES = 40  # of one window
RATE = 1000


def whisper(decoder_layers: int = 2) -> PreTrainedModel:
    """In float64."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=FIRST_TIME + TIMES, d_model=32, encoder_layers=1, decoder_layers=decoder_layers,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=FRAMES // 2, max_target_positions=64, init_std=0.3, median_filter_width=3,
        bos_token_id=END, eos_token_id=END, pad_token_id=END, decoder_start_token_id=BEGIN, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).to(torch.float64).eval()
    for name, value in {
        "_from_model_config": False,  # or loading would leave out what follows
        "no_timestamps_token_id": NO_TIMES,
        "is_multilingual": False,
        "prev_sot_token_id": BEGIN,
        "alignment_heads": [[0, 0], [1, 1]],
    }.items():
        setattr(model.generation_config, name, value)
    return model


def sharing(target: PreTrainedModel) -> PreTrainedModel:
    """A draft with an encoder of its own that reads the target's encoding."""
    draft = noisy(target)
    draft.config.draft_shares_encoder = True
    return draft


def tokenizer() -> WhisperTokenizer:
    """A token for each byte, and the special ones."""
    special = {"<|endoftext|>": END, "<|startoftranscript|>": BEGIN, "<|notimestamps|>": NO_TIMES}
    vocabulary = {byte: token for token, byte in enumerate(sorted(ByteLevel.alphabet()))}
    return WhisperTokenizer(vocab={**vocabulary, **special}, merges=[], pad_token="<|endoftext|>")


def feature_extractor() -> WhisperFeatureExtractor:
    """Of recordings of at most a window."""
    return WhisperFeatureExtractor(feature_size=8, sampling_rate=RATE, hop_length=50, chunk_length=2, n_fft=100)
