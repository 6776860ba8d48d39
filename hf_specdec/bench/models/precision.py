"""Precision and placement: weights in int8 or int4, models spread over devices."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, QuantoConfig

from hf_specdec.bench.settings import BenchError
from hf_specdec.compat.quanto_private import replace_extension

GGUF = "gguf"  # the precision of weights that stay in the blocks of a GGUF file
# The maps that accelerate computes itself; a device's name places the whole model there.
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def load_kwargs(
    precision: str | None = None,
    *,
    dtype: str = "auto",
    device_map: str | None = None,
    offload_folder: Path | None = None,
    argument: str = "--precision",
) -> dict[str, Any]:
    """Arguments for `from_pretrained`, and `blocks=True` for `load_gguf` in its place.

    Args:
        precision: `int8` (a scale per row) or `int4` (a scale and an offset for at most 128 weights each) for linear
            layers except the head, multiplied in `dtype`; `gguf` for the blocks of a GGUF file; None for `dtype`.
        dtype: `auto` (as stored) or a float's name.
        device_map: `auto` or another of `DEVICE_MAPS`, or a device; a model placed this way must not be moved.
        offload_folder: holds weights that fit into no device's memory.
        argument: the name of `precision` in messages.

    Raises:
        BenchError: arguments that exclude each other, an unknown device, or a missing package.
    """
    kwargs: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if precision == GGUF:
        kwargs["blocks"] = True
    elif precision is not None:
        _prepare_quanto(precision, argument)
        if offload_folder is not None:
            raise BenchError(
                f"--offload_folder: {str(offload_folder)!r} with {argument} {precision}: quanto quantizes weights "
                "during loading and can't offload them; leave out one of the two"
            )
        kwargs["quantization_config"] = QuantoConfig(weights=precision)
    if device_map is not None:
        _require(f"--device_map: {device_map!r}", "accelerate")
        kwargs["device_map"] = _device_map(device_map)
    if offload_folder is not None:
        if device_map is None:
            raise BenchError(f"--offload_folder: {str(offload_folder)!r} needs --device_map auto; give that too")
        kwargs["offload_folder"] = str(offload_folder)
    return kwargs


def check_loaded(
    model: PreTrainedModel,
    precision: str | None = None,
    device_map: str | None = None,
    *,
    argument: str = "--precision",
) -> None:
    """Refuse a model that was not quantized as requested, or that is offloaded so far that speculation can't use it.

    Weights offloaded to memory or disk are fetched for each pass, which works for target and draft, except for the
    first layer: transformers reports its device as the model's, and an offloaded layer's device is `meta`.

    Raises:
        BenchError: names the argument, its value and the way out.
    """
    name = type(model).__name__
    if precision not in (None, GGUF) and not quantized_layers(model):
        raise BenchError(
            f"{argument}: {precision!r} changes nothing in {name}, since quanto doesn't support its layers; leave "
            f"{argument} out for this model"
        )
    if model.device.type == "meta":
        raise BenchError(
            f"--device_map: {device_map!r} offloads even the first layer of {name}, which speculation doesn't "
            "support; free some memory, choose a smaller model, or give --precision int8 or int4"
        )


def quantize_made(model: PreTrainedModel, precision: str | None, *, argument: str = "--precision") -> None:
    """Quantize the linear layers, including the head, of a model that was made in memory.

    Raises:
        BenchError: a package is missing, or `precision` is for files.
    """
    if precision is None:
        return
    if precision == GGUF:
        raise BenchError(f"{argument}: {precision!r} is for GGUF files only; give a GGUF file as the model")
    _prepare_quanto(precision, argument)
    from optimum.quanto import freeze, quantize

    quantize(model, weights=f"q{precision}")
    freeze(model)
    model.config.quantization_config = QuantoConfig(weights=precision)


def quantized_layers(model: PreTrainedModel) -> int:
    """How many layers hold int8 or int4 weights."""
    if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
        return 0
    from optimum.quanto import QModuleMixin

    return sum(isinstance(module, QModuleMixin) and module.weight_qtype is not None for module in model.modules())


def unpack_without_compiler() -> None:
    """Make quanto unpack int4 weights on CPUs with torch's own operations.

    Otherwise quanto compiles a C++ extension on first use, which needs a compiler, most of a minute and a writable
    installation, and calls the same operations. An extension that is already loaded is left in place.
    """
    replace_extension(unpack=_unpack)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes `[N, ...]` to `[N * 8 / bits, ...]` numbers, beginning with the lowest bits of all bytes."""
    return torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])


def _prepare_quanto(precision: str, argument: str) -> None:
    _require(f"{argument}: {precision!r}", "optimum.quanto", "accelerate")
    if precision == "int4":
        unpack_without_compiler()


def _require(what: str, *packages: str) -> None:
    for package in packages:
        if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
            raise BenchError(f"{what} needs {package.replace('.', '-')}; pip install 'hf_specdec[precision]'")


def _device_map(name: str) -> str:
    if name not in DEVICE_MAPS:
        try:
            torch.device(name)
        except RuntimeError as error:
            raise BenchError(
                f"--device_map: {name!r} must be one of {', '.join(DEVICE_MAPS)}, or a device of this machine"
            ) from error
    return name
