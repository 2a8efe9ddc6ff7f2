"""`make ledger`: the first step in which a run differs from its plan, or from another run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from addons.tools import ledger
from engine.config.errors import UsageError
from tests.helpers import kit

STEPS = 36  # step 32 is the tail of the first epoch, with 11 examples


@pytest.fixture(scope="module")
def one(files, tmp_path_factory):
    """Return the folder of a run on one process."""
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_length": 16}
    fields |= {"per_device_batch_size": 8, "max_steps": STEPS}
    return kit.run_training(1, tmp_path_factory.mktemp("ledger") / "one", *kit.flags(**fields)).folder


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in kit.ledger_text(folder).splitlines()]


def write_ledger(folder: Path, entries: list[dict], end: str = "") -> Path:
    folder.mkdir()
    (folder / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + end)
    return folder


def test_command_exit_codes(one, tmp_path, capsys):
    def command(*argv) -> tuple[int, str]:
        """Return exit code and output."""
        return ledger.main([str(word) for word in argv]), capsys.readouterr().out

    found = lines(one)
    found[17], found[18] = found[18] | {"step": 17}, found[17] | {"step": 18}
    swapped = write_ledger(tmp_path / "swapped", found)
    assert command(one) == (0, f"{one}: the same examples as the plan in all {STEPS} steps\n")
    assert command(one, one) == (0, f"{one}: the same examples as {one} in all {STEPS} steps\n")
    code, text = command(swapped)
    assert (code, text[:22], text[-12:]) == (1, "step 17 differs: 32 ex", "in the plan\n")
    hashes = [f"32 examples, hash {entries[17]['ids']}" for entries in (lines(one), found)]
    assert command(one, swapped) == (1, f"step 17 differs: {hashes[0]} in {one}; {hashes[1]} in {swapped}\n")
    other = write_ledger(tmp_path / "other", [found[0] | {"data": "0" * 32}, *lines(one)[1:]])
    assert command(one, other)[1].startswith("the prepared rows differ: hash ")
    words = [sys.executable, "-m", "addons.tools.ledger", tmp_path / "none"]
    done = subprocess.run(words, cwd=kit.REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().startswith(f"error: {tmp_path / 'none'} has no ledger.jsonl")


def test_compare_names_missing_steps_and_skips_a_torn_line(one, tmp_path):
    found = lines(one)
    gap = write_ledger(tmp_path / "gap", found[:9] + found[10:])
    assert ledger.compare(gap) == f"{gap}: step 9 is missing"
    short = write_ledger(tmp_path / "short", found[:-2], end='{"step": 35, "exam')
    assert ledger.compare(short) is None  # a run that has not finished
    assert ledger.compare(one, short) == f"step {STEPS - 1} is only in {one}"
    assert ledger.compare(short, one) == f"step {STEPS - 1} is only in {one}"
    assert ledger.compare(one, gap) == f"step 9 is only in {one}"
    with pytest.raises(UsageError):
        ledger.compare(write_ledger(tmp_path / "empty", []))
