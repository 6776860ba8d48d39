"""Libraries of our own C++, compiled on first use and found on disk by later processes."""

from __future__ import annotations

from pathlib import Path

import torch

from hf_specdec.prepared import code_on_disk, cpp_compiler
from hf_specdec.prepared.compile_progress import progress_bar
from hf_specdec.prepared.own_builds import in_own_folder

KERNELS = Path(__file__).parent / "kernels"  # where the C++ is


def library_of(text: str) -> Path:
    """The library of some C++.

    Raises:
        Exception: whatever inductor raises where there is no compiler or it fails.
    """
    return code_on_disk.library_for(text) or _compile(text)


def _compile(text: str) -> Path:
    # Importing it takes seconds.
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    with in_own_folder(torch.device("cpu")), config.patch(cpp_compiler.INSTRUCTIONS), progress_bar("kernels", 1) as bar:
        library = Path(CppCodeCache.load(text)._name)
        bar.update()
    code_on_disk.keep(text, library)
    return library
