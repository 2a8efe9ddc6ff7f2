"""Check of `encode`: the first rows, as several new processes encode them, must be the same.

`make smoke` runs it with the flags of a run. Tests: tests/engine/tools/test_smoke.py.
"""

import hashlib
import inspect
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from engine.config import parsing
from engine.config.addon import Addon, overrides
from engine.config.errors import Failure
from engine.find_tasks import OPTIONS, Task, make_task
from engine.plan.dataset import load_task, resolve_sources
from engine.process.exit_codes import run_main
from engine.process.private_apis import replaced
from engine.rows import prepare
from engine.rows.examples import load_examples
from engine.rows.prepare import encode_files, encode_rows, inspect_columns
from tests.conformance.smoke_checks import place

ROWS = 32  # of each source
# (PYTHONHASHSEED, TZ): sets of texts have another order, and local clocks another day
PROCESSES = (("1", "Etc/GMT+12"), ("2", "Etc/GMT-12"), ("3", "Etc/GMT+12"))
HASHES = "--hashes"  # of one process, as JSON in the last line on stdout


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
    """Within, add to the set that is returned the environment variables that the code of the task reads for `encode`.

    Not those that the engine's reads: pyarrow asks for one when prepare.py makes an array."""
    own = [file for file in encode_files(task) if file.parent != Path(prepare.__file__).parent]
    noted = Environment({str(file) for file in own})
    with replaced({(os, "environ"): noted}):
        yield noted.names


def print_hashes(argv: list[str]) -> None:
    """Encode and print; raise Failure if `encode` reads a variable that is not in the cache key."""
    cfg, options = parsing.parse(argv, OPTIONS)
    task = make_task(cfg, options)
    load_task(cfg, task)
    with variables_read(task) as declared:
        task.fingerprint()
    hashes = {}
    streams = any(overrides(each, Addon.open_source) for each in cfg.addons)
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


def main(argv: list[str]) -> None:
    """Raise Failure if processes encode other rows. An error of one of them ends this one, too."""
    if argv[:1] == [HASHES]:
        return print_hashes(argv[1:])
    command = [sys.executable, __file__, HASHES, *argv]
    processes = []
    for seed, zone in PROCESSES:
        env = os.environ | {"PYTHONHASHSEED": seed, "TZ": zone}
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    if code := max(process.returncode for process in processes):
        sys.exit(code)  # each has printed why
    first, *others = [json.loads(output.splitlines()[-1]) for output in outputs]
    if differ := [name for name in first if any(other.get(name) != first[name] for other in others)]:
        raise Failure(
            f"smoke: `encode` of the task returns another {', '.join(differ)} in another process: it must depend on its batch "
            "alone, not on a generator without a seed, the order of a set, or the clock"
        )


if __name__ == "__main__":
    run_main(main)
