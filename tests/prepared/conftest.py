"""The kernels in the form for this processor and in that for AVX2."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from hf_specdec.prepared import few_token_products
from hf_specdec.prepared.cpp_compiler import INSTRUCTIONS
from hf_specdec.prepared.few_token_products import namespace, source


@cache
def _avx2_kernels(library: str, dtype: torch.dtype) -> Any:
    """The kernels as they are where there is no AVX-512, under a name of their own.

    Built with little optimization, which takes a few seconds; what they compute is the same.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    refusal = "#ifdef __AVX512F__\n#error the form for AVX-512\n#endif\n"
    name = f"avx2_{namespace(dtype)}"
    text = source(library, dtype).replace(f"NAMESPACE {namespace(dtype)}", f"NAMESPACE {name}")
    with config.patch({**INSTRUCTIONS, "cpp.simdlen": 256}):
        CppCodeCache.load(refusal + text, extra_flags=("-mno-avx512f", "-O1"))
    return getattr(torch.ops, name)


@pytest.fixture(params=["this processor", "AVX2"])
def each_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels as built for this processor, then those for AVX2 in their place."""
    if request.param == "AVX2":
        monkeypatch.setattr(few_token_products, "kernels", _avx2_kernels)
