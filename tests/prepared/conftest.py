"""Compiled code of a test's own, and the kernels in the forms for this processor and for others."""

import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch

from hf_specdec.compat.inductor import INSTRUCTIONS
from hf_specdec.prepared import code_folder, code_on_disk, compiled_step, few_token_products
from hf_specdec.prepared.few_token_products import library_with, operation, source, suffix
from hf_specdec.prepared.own_builds import in_own_folder

EMULATED_AMX = (Path(helpers.__path__[0]) / "emulated_amx.h").read_text().replace("#pragma once", "")
# By form, what names of its kernels contain, how it is compiled, and what its source begins with.
OTHERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "AVX2": (
        "avx2",
        {"cpp.simdlen": 256},
        ("-mno-avx512f",),
        "#ifdef __AVX512F__\n#error the form for AVX-512\n#endif\n",
    ),
    "no tiles": ("no_tiles", {}, (), "#undef __AMX_INT8__\n"),
    "tiles in software": ("tiles", {}, (), f"#undef __AMX_INT8__\n{EMULATED_AMX}"),
}
WITH_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
FORMS = [
    "this processor",
    *(["AVX2", "tiles in software"] if WITH_AVX512 else []),
    *(["no tiles"] if torch.cpu._is_amx_tile_supported() else []),
]


def _kernel(form: str, name: str, dtype: torch.dtype) -> Any:
    mark = _load(form, library_with(name), dtype)
    return getattr(torch.ops.hf_specdec, operation(name, dtype).replace(suffix(dtype), f"{mark}_{suffix(dtype)}"))


@cache
def _load(form: str, library: str, dtype: torch.dtype) -> str:
    """The kernels as they are on another processor, under names of their own; returns what these contain.

    Built without optimization and with calls in place of inlined functions, which takes a few seconds; what they
    compute is the same.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    mark, settings, flags, start = OTHERS[form]
    text = source(library, dtype).replace(f"SUFFIX {suffix(dtype)}", f"SUFFIX {mark}_{suffix(dtype)}")
    with in_own_folder(torch.device("cpu")), config.patch({**INSTRUCTIONS, **settings}):
        CppCodeCache.load(start + text, extra_flags=(*flags, "-O0", "-Dalways_inline=unused"))
    return mark


@pytest.fixture(params=FORMS)
def each_form(request, monkeypatch) -> None:
    """The kernels as built for this processor, then those for others in their place."""
    if request.param in OTHERS:
        monkeypatch.setattr(few_token_products, "kernel", partial(_kernel, request.param))


@pytest.fixture
def disk(tmp_path, monkeypatch) -> Iterator[Path]:
    """In place of torch's folder (torch), the user's cache (cache) and that of temporary files (temporary)."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(code_on_disk, "_workplaces", {})
    code_folder.folders_named.cache_clear()
    code_on_disk._made_for.cache_clear()
    yield tmp_path
    code_folder.folders_named.cache_clear()
    code_on_disk._made_for.cache_clear()


@pytest.fixture
def own_steps(tmp_path, monkeypatch) -> Iterator[None]:
    """Inductor makes the code of steps in this test: none is found that others made. C++ is compiled once a session."""
    folder, digest = code_on_disk._folder(), code_on_disk._digest
    mark = f"{tmp_path.parent.name}-{tmp_path.name}-"
    monkeypatch.setattr(code_on_disk, "_digest", lambda what: (mark if type(what) is tuple else "") + digest(what))
    compiled_step._codes.clear()
    yield
    compiled_step._codes.clear()
    for record in folder.glob(f"{mark}*"):
        record.unlink()
