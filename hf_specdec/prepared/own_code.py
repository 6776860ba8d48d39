"""Libraries of our own C++, compiled on first use and found on disk by later processes."""

from __future__ import annotations

from pathlib import Path

import torch

from hf_specdec.compat import inductor
from hf_specdec.prepared import code_on_disk
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
    with in_own_folder(torch.device("cpu")), progress_bar("kernels", 1) as bar:
        library = inductor.library_of(text)
        bar.update()
    code_on_disk.keep(text, library)
    return library
