"""Libraries of the package's C++, compiled on first use and loaded from disk by later processes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from hf_specdec.compat import inductor
from hf_specdec.prepared import code_on_disk
from hf_specdec.prepared.compile_progress import progress_bar
from hf_specdec.prepared.own_builds import in_own_folder

KERNELS = Path(__file__).parent / "kernels"  # the folder of C++ files
FLAGS = ("-ftree-loop-vectorize",)  # turned off by inductor
_INCLUDE = re.compile(r'^#include "(.+)"$|^#pragma once$', re.MULTILINE)  # of the package's files


def joined(*files: str) -> str:
    """Join files of `KERNELS` into one text, with the headers that they include inserted, each once.

    So a library does not depend on the package's location.
    """
    seen: set[str] = set()

    def text_of(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (KERNELS / name).read_text()
        return f'#line 1 "{name}"\n{_INCLUDE.sub(lambda found: _included(found, name, text), text)}'

    def _included(found: re.Match[str], name: str, text: str) -> str:
        """The text that replaces an include; line directives let the compiler's messages name the original files."""
        if found[1] is None:
            return ""
        following = text.count("\n", 0, found.end()) + 2
        return f'{text_of(found[1])}\n#line {following} "{name}"'

    return "\n".join(text_of(file) for file in files)


def library_of(text: str) -> Path:
    """Compile C++ into a library, or find it on disk.

    Raises:
        Exception: whatever inductor raises if there is no compiler or it fails.
    """
    return code_on_disk.library_for(text) or _compile(text)


def _compile(text: str) -> Path:
    with in_own_folder(torch.device("cpu")), progress_bar("kernels", 1) as bar:
        library = inductor.library_of(text, FLAGS)
        bar.update()
    code_on_disk.keep(text, library)
    return library
