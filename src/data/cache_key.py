"""Cache key of prepared rows: the data, the task with its tokenizer, the code behind `encode`, the version of `datasets`.

Tests: tests/data/test_dataset.py.
"""

import hashlib
import inspect
from pathlib import Path

from src import text
from src.data.sources import Source
from src.tasks import Task, base

CODE = ("prepare.py", "raw_rows.py", "readers.py", "arrow_columns.py")  # in the cache key, besides that of `encode`


def cache_key(task: Task, source: Source) -> str:
    """Return the cache key of prepared rows: a hash of the data, task, code and version of `datasets`."""
    import datasets

    code = [path.read_text() for path in (*encode_files(task), *(Path(__file__).with_name(name) for name in CODE))]
    parts = (source.key(), source.split, task.fingerprint(), task.decode_media, code, datasets.__version__)
    parts += (_tokenizer_settings(task),)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def encode_files(task: Task) -> list[Path]:
    """Return the files of the code behind a task's `encode`: src/text, those of its classes, and `encode_helpers`.

    Of a task that is a folder, all its files."""
    files = [Path(module.__file__ or "") for module in (text, *task.encode_helpers)]
    files += [Path(inspect.getfile(c)) for c in type(task).__mro__ if c not in (base.Task, object)]
    every = [file.parent.glob("*.py") if file.stem == "__init__" else [file] for file in files]
    return sorted({path for files in every for path in files})


def _tokenizer_settings(task: Task) -> list[tuple[str, str]]:
    """Return the settings of a task's tokenizer that tokenizer.json lacks, such as the end-of-text token.

    A base model and its instruct variant may differ in nothing else."""
    tokenizer = getattr(task, "tokenizer", None)
    settings = {name: getattr(tokenizer, name, "") for name in ("truncation_side", "split_special_tokens")}
    return sorted(
        (name, str(value)) for name, value in (getattr(tokenizer, "special_tokens_map", {}) | settings).items()
    )
