"""Hashes of the first rows as `encode` of the task makes them in this process, as JSON in the last line on stdout.

smoke.py compares those of several processes. Tests: tests/engine/tools/test_smoke.py.
"""

import hashlib
import inspect
import json
import os
from contextlib import contextmanager
from itertools import islice

from engine.config import parsing
from engine.config.add_on import AddOn, overrides
from engine.config.addons import used_addons
from engine.config.errors import Failure
from engine.data.dataset import load_task, resolve_sources
from engine.data.examples import load_examples
from engine.data.prepare import encode_files, encode_rows, inspect_columns
from engine.process.exit_codes import run_main
from engine.process.private_apis import replaced
from engine.task_registry import OPTIONS, Task, make_task
from engine.tools.task_checks import place

ROWS = 32  # of each source


class Environment(dict):
    """A copy of os.environ that notes which variables the code in `files` reads."""

    def __init__(self, files: set[str]):
        super().__init__(os.environ)
        self.files = files
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.note(name)
        return super().__getitem__(name)

    def get(self, name, default=None):  # pyrefly: ignore[bad-override]
        self.note(name)
        return super().get(name, default)

    def note(self, name: str) -> None:
        callers = [frame.filename for frame in inspect.stack(0)[2:4] if frame.function != "getenv"]
        if callers[0] in self.files:
            self.names.add(name)


@contextmanager
def variables_read(task: Task):
    """Within, add to the set that is returned the environment variables that the code behind `encode` reads."""
    noted = Environment({str(file) for file in encode_files(task)})
    with replaced({(os, "environ"): noted}):
        yield noted.names


def main(argv: list[str]) -> None:
    """Encode and print; raise Failure if `encode` reads a variable that is not in the cache key."""
    cfg, options = parsing.parse(argv, OPTIONS)
    task = make_task(cfg, options)
    load_task(cfg, task)
    with variables_read(task) as declared:
        task.fingerprint()
    hashes = {}
    streams = any(overrides(each, AddOn.open_source) for each in used_addons(cfg))
    with variables_read(task) as read:
        for split, sources in resolve_sources(cfg).items():
            for name, source in sources.items():
                examples = None if source.computed or (streams and split == "train") else load_examples(source, cfg)
                if examples is None:
                    continue
                columns, features = inspect_columns(task, examples)
                rows = examples.decode([*islice(examples.rows(columns), ROWS)], columns, task.decode_media)
                _, batch, _ = encode_rows(task, rows, columns, features.arrow_schema)
                for column in batch.schema.names:
                    values = repr(batch[column].to_pylist()).encode()
                    hashes[f"{column} of {split} data {name}".strip()] = hashlib.sha256(values).hexdigest()
    if read - declared:
        raise Failure(
            f"{place(task)}: `encode` reads the environment variable {', '.join(sorted(read - declared))}, so that prepared "
            "rows of another value are taken from the cache: make it an option of the task, or add it to `fingerprint`"
        )
    print(f"\n{json.dumps(hashes)}")


if __name__ == "__main__":
    run_main(main)
