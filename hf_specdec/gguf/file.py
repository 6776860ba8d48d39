"""Reads the header of a GGUF file: its metadata, and where its tensors are. Their data is not read.

The reader of the package `gguf` takes seconds for the vocabulary, of which only the size is needed here.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

_NUMBERS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MOST_DIMS = 4


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Args:
        kind: the name of its type, such as Q4_0.
        shape: rows first.
        block: how many numbers a block of its type holds, and in how many bytes.
        offset: the position of its first byte in the file.
    """

    kind: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    offset: int

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) // self.block[0] * self.block[1]


@dataclass(frozen=True)
class GgufFile:
    """A file's metadata, in which arrays of strings are replaced by their lengths, and its tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>` in the metadata."""
        return self.metadata.get(f"{self.metadata['general.architecture']}.{key}", default)


def read(path: Path) -> GgufFile:
    """Read the header of a file.

    Raises:
        ValueError: the file is not a GGUF file, is truncated, or has an invalid header.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with GGUF.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _Header(path, content).read()
            except (struct.error, UnicodeDecodeError, KeyError) as error:
                raise ValueError(f"{path} is damaged: its header can't be read; fetch it again.") from error


class _Header:
    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._at = path, content, 4

    def read(self) -> GgufFile:
        """Read from the version on; where a value ends is only known once it is read."""
        version, tensors, keys = self._take("<IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"{self._path} has version {version} of the GGUF format; versions 2 and 3 can be read.")
        metadata = {}
        for _ in range(keys):
            key = self._string()
            metadata[key] = self._value(*self._take("<I"))
        if "general.architecture" not in metadata:
            raise ValueError(f"{self._path} does not name its architecture.")
        listed = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment if alignment else self._at
        placed = {name: self._placed(name, kind, shape, start + offset) for name, kind, shape, offset in listed}
        return GgufFile(self._path, metadata, placed)

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._content, self._at)
        self._at += struct.calcsize(form)
        return found

    def _string(self, *, skip: bool = False) -> str:
        (length,) = self._take("<Q")
        begin, self._at = self._at, self._at + length
        if self._at > len(self._content):
            raise struct.error("a string ends after the file")
        return "" if skip else self._content[begin : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take("<" + _NUMBERS[kind])[0]
        kind, count = self._take("<IQ")
        if kind == _STRING:
            for _ in range(count):
                self._string(skip=True)
            return count
        form = f"<{count}{_NUMBERS[kind]}"
        if count > len(self._content):
            raise struct.error("an array ends after the file")
        return list(self._take(form))

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, (dims,) = self._string(), self._take("<I")
        if dims > _MOST_DIMS:
            raise struct.error("too many dimensions")
        shape = self._take(f"<{dims}Q")[::-1]
        kind, offset = self._take("<IQ")
        return name, kind, shape, offset

    def _placed(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> StoredTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(f"{self._path}: {name} has type {kind}, which the package gguf doesn't know.") from None
        tensor = StoredTensor(known.name, shape, GGML_QUANT_SIZES[known], offset)
        if not shape or shape[-1] % tensor.block[0]:
            raise ValueError(f"{self._path} is damaged: rows of {name} are not whole blocks of {known.name}.")
        if tensor.offset + tensor.bytes > len(self._content):
            raise ValueError(f"{self._path} ends before {name} does: it is truncated or damaged; fetch it again.")
        return tensor
