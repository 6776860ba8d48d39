"""Libraries of our own C++, compiled on first use and found on disk by later processes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from hf_specdec.compat import inductor
from hf_specdec.prepared import code_on_disk
from hf_specdec.prepared.compile_progress import progress_bar
from hf_specdec.prepared.own_builds import in_own_folder

KERNELS = Path(__file__).parent / "kernels"  # where the C++ is
FLAGS = ("-ftree-loop-vectorize",)  # which inductor turns off
_INCLUDE = re.compile(r'^#include "(.+)"$|^#pragma once$', re.MULTILINE)  # of a file of ours


def joined(*files: str) -> str:
    """Some of the files of `KERNELS` as one text, with the headers that they include in their places, each once.

    A library of it depends on nothing else of ours, wherever the package lies.
    """
    seen: set[str] = set()

    def text_of(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (KERNELS / name).read_text()
        return f'#line 1 "{name}"\n{_INCLUDE.sub(lambda found: _included(found, name, text), text)}'

    def _included(found: re.Match[str], name: str, text: str) -> str:
        """What stands in place of an include; the compiler's messages name the files that lines are from."""
        if found[1] is None:
            return ""
        following = text.count("\n", 0, found.end()) + 2
        return f'{text_of(found[1])}\n#line {following} "{name}"'

    return "\n".join(text_of(file) for file in files)


def library_of(text: str) -> Path:
    """The library of some C++.

    Raises:
        Exception: whatever inductor raises where there is no compiler or it fails.
    """
    return code_on_disk.library_for(text) or _compile(text)


def _compile(text: str) -> Path:
    with in_own_folder(torch.device("cpu")), progress_bar("kernels", 1) as bar:
        library = inductor.library_of(text, FLAGS)
        bar.update()
    code_on_disk.keep(text, library)
    return library
