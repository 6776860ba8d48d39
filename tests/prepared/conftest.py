"""The kernels in the form for this processor and in that for AVX2."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from hf_specdec.prepared import few_token_products
from hf_specdec.prepared.cpp_compiler import INSTRUCTIONS
from hf_specdec.prepared.few_token_products import library_with, operation, source, suffix


def _avx2_kernel(name: str, dtype: torch.dtype) -> Any:
    _load_for_avx2(library_with(name), dtype)
    return getattr(torch.ops.hf_specdec, operation(name, dtype).replace(suffix(dtype), f"avx2_{suffix(dtype)}"))


@cache
def _load_for_avx2(library: str, dtype: torch.dtype) -> None:
    """The kernels as they are where there is no AVX-512, under names of their own.

    Built with little optimization, which takes a few seconds; what they compute is the same.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    refusal = "#ifdef __AVX512F__\n#error the form for AVX-512\n#endif\n"
    text = source(library, dtype).replace(f"SUFFIX {suffix(dtype)}", f"SUFFIX avx2_{suffix(dtype)}")
    with config.patch({**INSTRUCTIONS, "cpp.simdlen": 256}):
        CppCodeCache.load(refusal + text, extra_flags=("-mno-avx512f", "-O1"))


@pytest.fixture(params=["this processor", "AVX2"])
def each_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels as built for this processor, then those for AVX2 in their place."""
    if request.param == "AVX2":
        monkeypatch.setattr(few_token_products, "kernel", _avx2_kernel)
