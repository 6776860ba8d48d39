"""The multi-token-prediction layers of transformers' `MtpModel`, run one by one. Seen in transformers 5.23 and 5.24."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

FIRST_VERSION = "5.23"  # the first whose models return the hidden states of chosen layers
# The fields for the number of layers, in transformers' configurations and in those of checkpoints that it reads.
COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")


def check_version(argument: str) -> None:
    """Refuse versions of transformers whose models don't return the hidden states of chosen layers.

    Raises:
        ValueError: names the argument, and the version that it needs.
    """
    if Version(transformers.__version__).release < Version(FIRST_VERSION).release:
        raise ValueError(
            f"{argument} needs transformers {FIRST_VERSION} or newer, and {transformers.__version__} is installed: "
            f"pip install 'transformers>={FIRST_VERSION}'."
        )


def layer_count(model: PreTrainedModel) -> int:
    """The number of such layers in a model's configuration."""
    config = model.config.get_text_config(decoder=True)
    return next((count for name in COUNTS if (count := getattr(config, name, None))), 0)


@contextmanager
def _as_transformers_names_them(model: PreTrainedModel) -> Iterator[None]:
    """Give the configuration the fields that `MtpModel` reads within the block; Qwen3.5's has others."""
    config, count = model.config.get_text_config(decoder=True), layer_count(model)
    fields: dict[str, Any] = {"num_mtp_layers": count}
    if getattr(config, "layer_types", None) is not None:
        fields["mtp_layer_types"] = ["full_attention"] * count
    missing = {name: value for name, value in fields.items() if getattr(config, name, None) is None}
    try:
        for name, value in missing.items():
            setattr(config, name, value)
        yield
    finally:
        for name in missing:
            delattr(config, name)


def load(model: PreTrainedModel) -> Any:
    """Load a target's `MtpModel` from the target's checkpoint, in the target's dtype.

    Embeddings, head and rotary frequencies are the target's own.

    Raises:
        OSError, RuntimeError, ValueError: the checkpoint is not there or has no such weights.
    """
    from transformers import modeling_layers  # imported here, since transformers imports it only with a model's class

    last = next(model.get_decoder().layers[-1].parameters())
    with _as_transformers_names_them(model):
        made = modeling_layers.MtpModel.from_pretrained(model, device_map={"": last.device})
    for name, part in made.named_children():
        if name in ("layers", "shared_post_norm"):
            part.to(last.device, last.dtype)
    return made.eval()


def layer_states(
    mtp: Any, layer: int, embeddings: Tensor, states: Tensor, positions: Tensor, mask: Tensor, cache: Mapping[str, Any]
) -> Tensor:
    """Run a layer over tokens and the hidden states before them, like `MtpModel.forward_layer`.

    That method makes masks for one row only.

    Args:
        embeddings, states: `[B, k, H]`.
        positions: `[B, k]`, of the tokens.
        mask: additive, `[B, 1, k, span]`.
        cache: of all layers, by the name of the argument that takes it.

    Returns:
        `[B, k, H]`.
    """
    rotated = None
    if mtp.rotary_emb is not None:
        kind = {"layer_type": mtp.config.layer_types[layer]} if getattr(mtp, "has_per_layer_rope", False) else {}
        rotated = mtp.rotary_emb(embeddings, position_ids=positions, **kind)
    made: Tensor = mtp.layers[layer](
        embeddings,
        states,
        position_embeddings=rotated,
        attention_mask=mask,
        position_ids=positions,
        **cache,
    )
    return mtp.shared_post_norm(made) if mtp.use_shared_post_norm else made


def logits(mtp: Any, states: Tensor) -> Tensor:
    """Apply the target's head to the layers' hidden states `[..., H]`."""
    projected: Tensor = mtp._project_to_logits(states)
    return projected
