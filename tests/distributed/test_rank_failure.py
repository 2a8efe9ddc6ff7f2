"""What goes wrong on one rank ends all of them, soon, and the last thing that anybody reads is what it was."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from src.checkpointing import checkpoint_list, format
from src.runtime import run_status
from src.tasks import causal_lm
from src.training import evaluation
from tests.helpers import kit

EARLIER = {"rank": 1, "time": 0.0, "message": "of a run of yesterday"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict:
    return kit.tiny_files(tmp_path_factory.mktemp("tiny"))


def recipe(tiny, **fields) -> list[str]:
    values = {"global_batch_size": 8, "per_device_batch_size": 2, "per_device_eval_batch_size": 1, "output_dir": "run"}
    values |= {"max_steps": 12, "learning_rate": 3e-3, "logging_steps": 1, "eval_steps": 6, "save_steps": 4}
    return kit.flags(**tiny | values | {"ddp_timeout": 600} | fields)


def together(script, argv, folder) -> None:
    """Run the command with the output of all ranks in one file, in the order of time, as a terminal shows it."""
    shared = os.open(Path(folder) / "together.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2, sys.stdout.fileno()):
        os.dup2(shared, number)
    kit._command(script, argv, folder)


def strike(monkeypatch, where: str, rank: int, error: BaseException) -> None:
    """Raise `error` on one rank, a few calls into what `where` names; in a loader's process if there are any."""
    holder, name, at = {
        "collator": (causal_lm.Task, "collate", 9),
        "forward": (causal_lm.Task, "loss", 9),
        "update": (train, "optimizer_step", 5),
        "evaluation": (evaluation, "seed_everything", 5),
        "saving": (format, "save_file", 1),
        "building": (causal_lm.Task, "build", 1),
    }[where]
    original, count = getattr(holder, name), [0]

    def struck(*args, **kwargs):
        count[0] += 1
        if count[0] >= at and int(os.environ["RANK"]) == rank:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(holder, name, struck)


def ended(folder: Path, flags: list[str]) -> tuple[list, str, float]:
    """Return (exit codes, what both ranks printed, the seconds it took)."""
    (folder / "together.txt").unlink(missing_ok=True)
    began = time.monotonic()
    try:
        kit.spawn(2, together, "train.py", flags, folder, out=folder / "out", timeout=40)
    except kit.RankFailed as failed:
        return failed.codes, (folder / "together.txt").read_text(), time.monotonic() - began
    return [0, 0], (folder / "together.txt").read_text(), time.monotonic() - began


def check_failed(folder: Path, flags: list[str], rank: int, message: str) -> str:
    """Assert that both ranks ended, and that the traceback of `rank` is the last word, and nobody else's anywhere."""
    codes, text, seconds = ended(folder, flags)
    assert codes == [1, 1], text
    assert seconds < 20
    assert re.findall(r"rank (\d+) failed:", text) == [str(rank)]
    last = text[text.index(f"rank {rank} failed:\nTraceback (most recent call last):") :].rstrip()
    assert message in last.splitlines()[-1]
    assert not re.search(
        "[Cc]onnection|gloo|peer|warning", last
    )  # nor anything that another rank has to say of its end
    log = (folder / "run" / "logs" / f"rank_{rank}.log").read_text()
    assert message in log[log.rindex("Traceback (most recent call last):") :]
    kept = json.loads((folder / "run" / "logs" / "failed.json").read_text())
    assert kept["rank"] == rank
    assert message in kept["message"].strip().splitlines()[-1]
    told = run_status.read_status(folder / "run")
    assert (told["status"], told["exit_code"]) == ("failed", 1)
    assert message in told["reason"]
    return last


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["collator", "forward", "update", "evaluation"])
def test_an_exception_on_one_rank_ends_all_with_its_traceback(tiny, tmp_path, monkeypatch, where, rank):
    strike(monkeypatch, where, rank, ValueError(f"a cosmic ray in {where}"))
    last = check_failed(tmp_path, recipe(tiny), rank, f"ValueError: a cosmic ray in {where}")
    assert "in struck" in last  # the place is named


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_a_loader_process_ends_all_with_its_traceback(tiny, tmp_path, monkeypatch, rank):
    strike(monkeypatch, "collator", rank, ValueError("a cosmic ray in a loader"))
    last = check_failed(tmp_path, recipe(tiny, dataloader_num_workers=2), rank, "ValueError: a cosmic ray in a loader")
    assert "Caught ValueError in DataLoader worker process" in last


def test_an_exception_while_saving_ends_all_with_its_traceback(tiny, tmp_path, monkeypatch):
    """What is no fault of the disk is one of the code: it is raised where training goes on, and nothing is published."""
    strike(monkeypatch, "saving", 0, ValueError("a cosmic ray in the saver"))
    check_failed(tmp_path, recipe(tiny), 0, "ValueError: a cosmic ray in the saver")
    assert checkpoint_list.list_checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize("rank", [0, 1])
def test_running_out_of_memory_on_one_rank_names_the_way_out(tiny, tmp_path, monkeypatch, rank):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    strike(monkeypatch, "forward", rank, error)
    last = check_failed(tmp_path, recipe(tiny), rank, f"rank {rank} ran out of memory")
    assert "give a smaller --per_device_batch_size" in last
    assert "OutOfMemoryError: CUDA out of memory" in last


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_before_the_first_step_ends_all(tiny, tmp_path, monkeypatch, rank):
    """The folder is not yet the run's then, so there is no place where a rank could see that another one failed first."""
    strike(monkeypatch, "building", rank, ValueError("a cosmic ray in the model"))
    codes, text, seconds = ended(tmp_path, recipe(tiny))
    assert codes == [1, 1], text
    assert seconds < 20
    assert "ValueError: a cosmic ray in the model" in text
    assert not (tmp_path / "run").exists()
    assert re.findall(r"rank (\d+) failed:\nTraceback", text) == [str(rank)]


def test_after_a_failure_the_same_command_goes_on(tiny, tmp_path, monkeypatch):
    """And is not ended by what an earlier failure left behind."""
    undisturbed = kit.run_training(2, tmp_path / "undisturbed", *recipe(tiny))
    with monkeypatch.context() as patch:
        strike(patch, "evaluation", 1, ValueError("a cosmic ray"))
        check_failed(tmp_path, recipe(tiny), 1, "a cosmic ray")
    codes, text, _ = ended(tmp_path, recipe(tiny))
    assert codes == [0, 0], text
    assert kit.same(kit.Run(tmp_path / "run").weights, undisturbed.weights)
    assert kit.timeless(tmp_path / "run") == kit.timeless(undisturbed.folder)
    assert not (tmp_path / "run" / "logs" / "failed.json").exists()
    assert run_status.read_status(tmp_path / "run")["status"] == "complete"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_mark_of_an_earlier_failure_does_not_end_a_new_start(tiny, tmp_path, rank):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "failed.json").write_text(json.dumps(EARLIER | {"rank": rank}))
    codes, text, _ = ended(tmp_path, recipe(tiny))
    assert codes == [0, 0], text
    assert "yesterday" not in text


def test_mutant_ranks_that_do_not_know_of_each_other_are_caught(tiny, tmp_path, monkeypatch):
    """Then both print a traceback, and that of the lost connection is the last."""
    monkeypatch.setattr(run_status, "report_failure", lambda *args: True)
    monkeypatch.setattr(run_status, "failed_rank", lambda *args: None)
    strike(monkeypatch, "forward", 1, ValueError("a cosmic ray"))
    with pytest.raises(AssertionError):
        check_failed(tmp_path, recipe(tiny), 1, "ValueError: a cosmic ray")
    text = (tmp_path / "together.txt").read_text()
    assert sorted(re.findall(r"rank (\d+) failed:", text)) == ["0", "1"]
