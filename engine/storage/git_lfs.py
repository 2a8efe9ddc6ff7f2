"""Pointer files of Git LFS in place of data, weights or tokenizers: refused by name.

A clone without Git LFS, or a raw link of a web page, has three lines of text instead of the file.
Tests: tests/engine/storage/test_git_lfs.py.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from engine.config.errors import UsageError

BEGIN = b"version https://git-lfs.github.com/spec/"
LONGEST = 1024  # bytes of a pointer, by its specification


def refuse_pointers(files: Iterable[str | Path], field: str, url: str = "") -> None:
    """Raise UsageError, which begins with `field`, for the first file that is a pointer. `url`: where it came from."""
    for file in files:
        if os.path.getsize(file) > LONGEST:
            continue
        with open(file, "rb") as content:
            if content.read(len(BEGIN)) == BEGIN:
                fix = "give the URL of the file itself" if url else f"run `git lfs pull` in {Path(file).parent}"
                raise UsageError(f"{field}: {url or file} is a pointer of Git LFS, not the file: {fix}")


def refuse_pointers_of_model(folder: str | Path, field: str, weights: bool) -> None:
    """Raise UsageError for a pointer among the files that a model, or without `weights` a tokenizer, is read from."""
    files = [file for file in sorted(Path(folder).iterdir()) if file.is_file()]
    suffixes = {".json", ".jinja", ".txt", ".model"}
    if weights:
        suffixes.add(".safetensors" if any(file.suffix == ".safetensors" for file in files) else ".bin")
    refuse_pointers([file for file in files if file.suffix in suffixes], field)
