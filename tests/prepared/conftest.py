"""The kernels in the form for this processor, and in those for processors with fewer instructions."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from hf_specdec.prepared import few_token_products
from hf_specdec.prepared.cpp_compiler import INSTRUCTIONS
from hf_specdec.prepared.few_token_products import library_with, operation, source, suffix

# By form, what names of its kernels contain, how it is compiled, and what its source begins with.
LESSER: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "AVX2": (
        "avx2",
        {"cpp.simdlen": 256},
        ("-mno-avx512f",),
        "#ifdef __AVX512F__\n#error the form for AVX-512\n#endif\n",
    ),
    "no tiles": ("no_tiles", {}, (), "#undef __AMX_INT8__\n"),
}
FORMS = ["this processor", "AVX2", *(["no tiles"] if torch.cpu._is_amx_tile_supported() else [])]


def _kernel(form: str, name: str, dtype: torch.dtype) -> Any:
    mark = _load(form, library_with(name), dtype)
    return getattr(torch.ops.hf_specdec, operation(name, dtype).replace(suffix(dtype), f"{mark}_{suffix(dtype)}"))


@cache
def _load(form: str, library: str, dtype: torch.dtype) -> str:
    """The kernels as they are on a lesser processor, under names of their own; returns what these contain.

    Built with little optimization, which takes a few seconds; what they compute is the same.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    mark, settings, flags, start = LESSER[form]
    text = source(library, dtype).replace(f"SUFFIX {suffix(dtype)}", f"SUFFIX {mark}_{suffix(dtype)}")
    with config.patch({**INSTRUCTIONS, **settings}):
        CppCodeCache.load(start + text, extra_flags=(*flags, "-O1"))
    return mark


@pytest.fixture(params=FORMS)
def each_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels as built for this processor, then those for lesser ones in their place."""
    if request.param in LESSER:
        monkeypatch.setattr(few_token_products, "kernel", partial(_kernel, request.param))
