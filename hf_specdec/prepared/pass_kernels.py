"""The kernels of compiled steps, for passes that are not compiled, such as those over prompts.

With `compile=True` some rounds cannot be compiled, and some passes have no compiled step. On a CPU, their linear layers
and attention over few tokens are then as fast as in compiled steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.host.torch_state import FunctionMode
from hf_specdec.models.onednn_linears import onednn_linears
from hf_specdec.prepared import few_token_products
from hf_specdec.prepared.compiled_step import COMPILING
from hf_specdec.prepared.few_token_products import FewTokenProducts
from hf_specdec.prepared.own_builds import tell_going_without
from hf_specdec.prepared.quantized_weights import parts_of


def pass_kernels(model: PreTrainedModel) -> Callable[[], AbstractContextManager[Any]]:
    """The context manager for a model's passes without gradients; other layers fall back to `onednn_linears`.

    The first pass compiles the kernels. If that fails, a warning says so and passes run without them, as under
    autocast.
    """
    others = onednn_linears(model)
    if model.device.type != "cpu" or not few_token_products.supported():
        return others
    quantized = any(parts_of(weight) is not None for weight in model.parameters())
    libraries = ("wide", "quantized") if quantized else ("wide",)

    def kernels() -> AbstractContextManager[Any]:
        rest = others()
        if torch.is_autocast_enabled("cpu") or not kernels_loaded(model.dtype, *libraries):
            return rest
        return FewTokenProducts(rest if isinstance(rest, FunctionMode) else None)

    return kernels


@cache
def kernels_loaded(dtype: torch.dtype, *libraries: str) -> bool:
    """Load kernels before a pass, since a failure within one leaves half a cache; return whether it succeeded."""
    if dtype not in few_token_products.NUMBERS:
        return False
    try:
        with COMPILING:
            for library in libraries:
                few_token_products.load(library, dtype)
    except Exception as error:  # compilers fail in many ways
        tell_going_without("compile=True", error)
        return False
    return True
