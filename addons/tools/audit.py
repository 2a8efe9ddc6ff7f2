"""Audit of a run: intervals between its checkpoints are trained again from the first, and compared with the second.

    make audit RUN=runs/x [SEGMENTS=3 or all] [SEED=N] [NPROC=…] [ARGS='--train_file FILE …']

Before, the hashes of these checkpoints are verified, and data and configuration are compared with what they record. Exit
code of the module: 0 if all intervals are reproduced, 1 if one differs, 3 if this machine cannot judge (make itself knows
only 0 and 2). RUN/audit.json has the result, and the model card of final/ a line; nothing else of the run is written.
docs/audit.md says what an audit proves. Tests: tests/addons/tools/test_audit.py.
"""

import argparse
import json
import math
import os
import random
import re
import secrets
import shutil
import sys
import tempfile
import time
from importlib import metadata
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import yaml

from engine.checkpointing import run_identity
from engine.checkpointing.checkpoint_folder import list_checkpoints, read_state
from engine.checkpointing.tensor_files import TensorReader, weights_sha256
from engine.config import parsing, validation
from engine.config.addresses import path_of_flag
from engine.config.errors import Failure, UsageError, writes_to
from engine.config.paths import read_yaml
from engine.find_tasks import OPTIONS, make_task
from engine.plan.dataset import prepare_datasets
from engine.process import console
from engine.process.exit_codes import STOP_IS_SUCCESS, run_main
from engine.storage import atomic_folder, jsonl, verify_hashes
from engine.tools import smoke
from src.training.schedules import has_same_rates

CANNOT_JUDGE = 3  # exit code
PACKAGES = ("torch", "accelerate", "transformers", "datasets")
REPRODUCED, ROUNDED, DIFFERS = "reproduced", "reproduced within rounding", "differs"
OTHER_KERNELS = "cannot be judged on this machine: other kernels"
# What rounding alone makes of losses and weights, relative, by precision: docs/project/guarantees.md, "Rounding".
BOUNDS = {"float64": (6e-7, 6e-7), "float32": (3e-6, 1e-5)}
BOUNDS_OF_16_BITS = (1.2e-2, 0.13)
STACK = ("versions", "device", "precision", "strategy")  # of environment.json, on which rounding depends
# Fields that an audit does not take from a stranger's run: where files are written, code, trackers, an upload, an end.
LEFT_OUT = {"output_dir", "resume", "cache_dir", "cache_per_node", "trust_remote_code", "report_to", "push_to_hub"}
LEFT_OUT |= {"hub_model_id", "time_limit", "profile_steps", "save_keep_every"}
NOT_COMPARED = ("tflops", "mfu", "gpu_memory_gib", "graphs")  # in a line, besides times
LINE = "Audit: "  # begins the line of the model card


class Interval:
    """Steps between two checkpoints of a run (`begin` 0: the start of the run), and what was found there."""

    def __init__(self, run: Path, begin: int, end: int):
        self.run, self.begin, self.end = run, begin, end
        self.state = jsonl.read_json(checkpoint(run, end) / "state.json")
        if "config" not in self.state:
            raise UsageError(f"{checkpoint(run, end)} has no readable state.json: restore it, or remove the folder")
        self.config = recorded(self.state["config"])
        self.name = f"steps {begin + 1:,} to {end:,}"
        self.result = ""
        self.reason = ""
        self.begins_near = False  # the first train line is the same, but for rounding
        self.begins_rounded = False  # it is not bitwise the same
        self.found: dict[str, Any] = {}  # for audit.json

    def differs(self, reason: str) -> None:
        """Note that this interval was not reproduced, and why."""
        self.result = DIFFERS
        self.reason = f"{self.reason}; {reason}" if self.reason else reason


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def recorded(config: dict) -> dict:
    """Return the fields of a recorded configuration that an audit takes, as those of a run that saves where it ends."""
    return {name: value for name, value in config.items() if name not in LEFT_OUT} | {"save_steps": 10**12}


# ---- which intervals -------------------------------------------------------------------------------------------------


def all_intervals(run: Path) -> tuple[list[Interval], str]:
    """Return the intervals of a run that can be judged, and a sentence about the steps that cannot, or nothing."""
    steps = [int(path.name[5:]) for path in list_checkpoints(run) if re.fullmatch(r"step_\d{8,}", path.name)]
    if not steps:
        raise UsageError(f"{run} has no checkpoint: give the folder of a run, with those that it has kept")
    began = (_starts(run) or [{"step": 0}])[0]["step"]  # more than 0: at a checkpoint of another run
    if began == 0 and steps[0] <= Interval(run, 0, steps[0]).state["config"]["save_steps"]:
        steps, text = [0, *steps], ""
    else:
        text = f"steps 1 to {steps[0]:,} cannot be judged: no checkpoint before step {steps[0]:,} was kept"
    intervals = [Interval(run, *pair) for pair in pairwise(steps)]
    if not intervals:
        raise UsageError(
            f"{run} has one checkpoint, and {text}: keep more of them by save_total_limit, save_keep_every"
        )
    return intervals, text


def choose(intervals: list[Interval], count: str, seed: int) -> list[Interval]:
    """Return `count` intervals (a number, or all), chosen by `seed`, in their order."""
    if count == "all":
        return intervals
    if not count.isdecimal() or not int(count):
        raise UsageError(f"SEGMENTS is {count!r}: give a number of intervals, or all")
    chosen = random.Random(seed).sample(range(len(intervals)), min(int(count), len(intervals)))
    return [intervals[number] for number in sorted(chosen)]


def _starts(run: Path) -> list[dict]:
    return jsonl.read_json(run / "environment.json").get("starts", [])


def check_processes(interval: Interval, processes: int) -> None:
    """Raise UsageError if a run without exact sums was on another number of processes in this interval."""
    if interval.config.get("exact_sums"):
        return
    starts = _starts(interval.run)
    before = [start for start in starts if start["step"] <= interval.begin][-1:]
    within = [start for start in starts if interval.begin < start["step"] < interval.end]
    worlds = {start["world_size"] for start in before + within} | {interval.state["identity"]["processes"]}
    if worlds != {processes}:
        were = " and ".join(map(str, sorted(worlds)))
        raise UsageError(
            f"NPROC is {processes}, but {interval.name} of {interval.run} were trained on {were}: without exact_sums a run is "
            f"audited on its own number of processes{f': give NPROC={were}' if len(worlds) == 1 else '; choose another SEED'}"
        )


# ---- before training -------------------------------------------------------------------------------------------------


def verify(interval: Interval) -> None:
    """Compare both checkpoints with their own hashes."""
    for step in filter(None, (interval.begin, interval.end)):
        folder = checkpoint(interval.run, step)
        errors = verify_hashes.verify(folder)
        if not errors and read_state(folder).get("weights_sha256", "") not in ("", weights_sha256(folder)):
            errors = ["its weights do not have the weights_sha256 of state.json"]
        if errors:
            interval.differs(f"{folder} is damaged: {'; '.join(errors)}")


def compare_records(run: Path, config: dict, flags: list[str], steps: list[int], known: dict) -> str:
    """Return how data, model and `config` differ from what the checkpoints of these steps record, or nothing.

    `known`: what this has found by configuration. Raise UsageError if the data is gone."""
    key = json.dumps(config, sort_keys=True)
    if key not in known:
        with tempfile.TemporaryDirectory(prefix="audit-") as folder:
            Path(folder, "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
            try:
                argv = ["--config", f"{folder}/run.yaml", *flags, "--output_dir", f"{folder}/run"]
                cfg, options = parsing.parse(argv, OPTIONS)
                validation.check(cfg, options)
                task = make_task(cfg, options)
                splits = prepare_datasets(cfg, task)
            except UsageError as error:
                text = f"{error}. If the data of {run} is elsewhere, name its place: ARGS='--train_file FILE …'"
                raise UsageError(text) from error
            known[key] = cfg, options, run_identity.identity("", 1, cfg, splits)
    cfg, options, current = known[key]
    found: dict[str, str] = {}
    for step in filter(None, steps):
        state = read_state(checkpoint(run, step))
        own = current | {name: state["identity"][name] for name in ("mixed_precision", "processes")}
        refused, _ = run_identity.changes_since(state, cfg, options, own, has_same_rates)
        found |= {name: f"{text} (step {step:,} was trained with the first)" for name, text in refused.items()}
    return "; ".join(found.values())


# ---- training again --------------------------------------------------------------------------------------------------


def train(interval: Interval, launcher: list[str], script: str, flags: list[str], folder: Path) -> None:
    """Train an interval again in `folder`, from a link to its first checkpoint, on the schedule of the whole run."""
    (folder / "checkpoints").mkdir(parents=True)
    if interval.begin:
        source = checkpoint(interval.run, interval.begin)
        checkpoint(folder, interval.begin).symlink_to(source.resolve(), target_is_directory=True)
    (folder / "stop").write_text(str(interval.end))
    (folder / "run.yaml").write_text(yaml.safe_dump(interval.config), encoding="utf-8")
    precision = interval.state["identity"]["mixed_precision"]
    if "launch" in launcher:  # over that of the accelerate file
        place = launcher.index("launch") + 1
        launcher = [*launcher[:place], "--mixed_precision", precision, *launcher[place:]]
    words = [*launcher, script, "--config", str(folder / "run.yaml"), *flags, "--output_dir", str(folder)]
    env = smoke.environment() | {STOP_IS_SUCCESS: "1", "ACCELERATE_MIXED_PRECISION": precision}
    smoke.run_command(words, env)
    if not checkpoint(folder, interval.end).exists():
        raise Failure(f"audit: train.py has ended without a checkpoint of step {interval.end:,}: see the lines above")


def processes_of(launcher: list[str]) -> int:
    """Return the number of processes that a launcher starts."""
    for flag in ("--num_processes", "--nproc_per_node"):
        if flag in launcher:
            return int(launcher[launcher.index(flag) + 1])
    return 1


# ---- comparison ------------------------------------------------------------------------------------------------------


def compare(interval: Interval, folder: Path) -> None:
    """Compare the checkpoint, the lines and the ledger of an interval with those of the one that was trained again."""
    run, end, state = interval.run, interval.end, interval.state
    theirs, mine = (_restored(each, end) for each in (run, folder))
    names = sorted(theirs | mine, key=lambda name: (not name.startswith("model/"), name))
    tensors = [name for name in names if theirs.get(name) != mine.get(name)]
    batches = _first_difference(*(_ledger(each, interval) for each in (run, folder)))
    lines = [_lines(each, interval) for each in (run, folder)]
    different_line = _first_difference(*lines)
    interval.found |= {"compared": len(names), "weights_sha256": state.get("weights_sha256")}
    if not (tensors or batches or different_line):
        interval.result = REPRODUCED
        return
    distance = _distance(run, folder, end) if tensors else 0.0
    interval.found |= {"differ": len(tensors), "distance_of_weights": distance}
    if tensors:
        interval.differs(f"{len(tensors)} of {len(names)} tensors and numbers, the first is {tensors[0]}")
    for text in filter(None, (batches, different_line)):
        interval.differs(text)
    # Rounding alone: on the same rows, at the same rates, losses within the bound.
    precision, of_losses, of_weights = _bounds(state)
    pairs = [pair for pair in zip(*lines, strict=False) if pair[0]["kind"] == "train"]
    near = [_is_near(one, other, of_losses) for one, other in pairs]
    interval.begins_near = all(near[:1]) and not batches
    interval.begins_rounded = interval.begins_near and bool(pairs) and pairs[0][0] != pairs[0][1]
    may_round = not interval.config.get("exact_sums") and _stack(run) != _stack(folder)
    if may_round and not batches and all(near) and distance <= of_weights:
        interval.result = ROUNDED
        interval.reason = f"weights {distance:.1e} apart, at most {of_weights:.1e} in {precision}"


def _restored(folder: Path, step: int) -> dict[str, str]:
    """Return {PART/NAME: hash or value} of what a checkpoint restores, except what is only logged."""
    state = smoke.state_at(folder, step)
    return {name: value for name, value in state.items() if not name.startswith(("progress/", "meter/"))}


def _lines(folder: Path, interval: Interval) -> list[dict]:
    """Return the lines of metrics.jsonl of an interval, without times."""
    lines = jsonl.read_lines(folder / "metrics.jsonl")
    return [
        {name: value for name, value in line.items() if "second" not in name and name not in NOT_COMPARED}
        for line in lines
        if interval.begin < line["step"] <= interval.end
    ]


def _ledger(folder: Path, interval: Interval) -> list[dict]:
    """Return the hash of the prepared rows, and those of the rows of each step, as ledger.jsonl has them."""
    lines = jsonl.read_lines(folder / "ledger.jsonl")
    rows = [{"kind": "ledger", "step": 0, "data": line.get("data")} for line in lines[:1]]
    return rows + [line | {"kind": "ledger"} for line in lines if interval.begin < line["step"] <= interval.end]


def _first_difference(theirs: list[dict], mine: list[dict]) -> str:
    """Return the first line of a run that is another one here, with what differs; nothing if the run has no lines."""
    for one, other in zip_longest(theirs, mine) if theirs else ():
        if one != other:
            line = one or other
            name = f"the {line['kind']} line of step {line['step']:,}"
            if not one or not other or (one["kind"], one["step"]) != (other["kind"], other["step"]):
                return f"{name} is only {'in the run' if one else 'here'}, or a line before it is missing"
            values = [
                f"{key} {one.get(key)} → {other.get(key)}" for key in one | other if one.get(key) != other.get(key)
            ]
            return f"{name}: {', '.join(values)}"
    return ""


def _is_near(theirs: dict, mine: dict, bound: float) -> bool:
    """Return whether two train lines are those of the same work, but for a rounded loss."""
    same = all(theirs.get(name) == mine.get(name) for name in ("kind", "step", "weight", "learning_rate", "skipped"))
    one, other = theirs["loss"], mine.get("loss")
    return same and (one == other or (None not in (one, other) and abs(one - other) <= bound * abs(one)))


def _bounds(state: dict) -> tuple[str, float, float]:
    """Return (precision, bound of losses, bound of weights) of rounding alone."""
    precision = state["identity"]["mixed_precision"]
    precision = state["config"]["dtype"] if precision == "no" else precision
    return precision, *BOUNDS.get(precision, BOUNDS_OF_16_BITS)


def _distance(run: Path, folder: Path, step: int) -> float:
    """Return the norm of the difference of two sets of weights, relative to the norm of the first."""
    files = {re.sub(r"-\d+-of-\d+$", "", file.stem) for file in checkpoint(run, step).glob("*model*.safetensors")}
    squares = [0.0, 0.0]
    for part in files:
        theirs, mine = (TensorReader(checkpoint(each, step), part) for each in (run, folder))
        for name in theirs.where:
            one = theirs.full(name).double()
            if name not in mine.where or mine.shape(name) != one.shape:
                return math.inf
            squares[0] += one.sub(mine.full(name).double()).square().sum().item()
            squares[1] += one.square().sum().item()
    return math.sqrt(squares[0] / max(squares[1], 1e-30))


def _stack(folder: Path) -> dict:
    environment = jsonl.read_json(folder / "environment.json")
    return {name: environment.get(name) for name in STACK}


def judge(intervals: list[Interval]) -> int:
    """Tell intervals that differ from those that other kernels have rounded; return the exit code.

    This machine has other kernels if an interval begins with a rounded line, and none is bitwise that of the run."""
    results = [each.result for each in intervals]
    if REPRODUCED not in results and any(each.begins_rounded for each in intervals):
        for each in intervals:
            if each.result == DIFFERS and each.begins_near:
                each.result = OTHER_KERNELS
    results = [each.result for each in intervals]
    return 1 if DIFFERS in results else CANNOT_JUDGE if OTHER_KERNELS in results else 0


# ---- the result ------------------------------------------------------------------------------------------------------


def add_to_card(final: Path, line: str) -> None:
    """Replace the line about the audit in the model card of final/, and its hash in the manifest, by one rename."""
    manifest = verify_hashes.read_manifest(final)
    if "README.md" not in manifest.get("files", {}) or verify_hashes.verify(final):
        return
    entries = {name: entry for name, entry in manifest["files"].items() if name != "README.md"}
    with atomic_folder.temporary_folder(final) as temporary:
        shutil.copytree(final, temporary, copy_function=_link, dirs_exist_ok=True)
        for name in ("README.md", verify_hashes.MANIFEST):
            (temporary / name).unlink()  # the other name of the file in final/ keeps its text
        kept = [text for text in (final / "README.md").read_text("utf-8").splitlines() if not text.startswith(LINE)]
        (temporary / "README.md").write_text("\n".join(kept).rstrip("\n") + f"\n\n{line}\n", encoding="utf-8")
        atomic_folder.put_in_place(temporary, final, entries, **manifest["about"])


def _link(source: str, target: str) -> None:
    """Give a file another name, or copy it where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def audit(run: Path, count: str, seed: int, command: list[str]) -> int:
    """Audit a run, print and write what was found; return the exit code."""
    launcher, script, flags = smoke.split_command(command)
    processes = processes_of(launcher)
    intervals, not_kept = all_intervals(run)
    chosen = choose(intervals, count, seed)
    for each in chosen:
        check_processes(each, processes)
    console.say(f"audit: {len(chosen)} of {len(intervals)} intervals of {run}, chosen by seed {seed}")
    known: dict = {}
    claim, file = "", run / "config.yaml"
    if file.exists() and (claim := compare_records(run, recorded(read_yaml(file)), flags, [intervals[-1].end], known)):
        claim = f"config.yaml is not what the newest checkpoint records: {claim}"
    with tempfile.TemporaryDirectory(prefix="audit-") as scratch:
        for each in chosen:
            verify(each)
            if not each.result and (changed := compare_records(run, each.config, flags, [each.begin, each.end], known)):
                each.differs(f"data or configuration is not what the checkpoints record: {changed}")
            if not each.result:
                console.say(f"\naudit: {each.name}")
                folder = Path(scratch, f"{each.begin}_{each.end}")
                train(each, launcher, script, flags, folder)
                compare(each, folder)
                shutil.rmtree(folder)
    found = judge(chosen)
    code = 1 if claim else found
    result: dict[str, Any] = {"exit_code": code, "seed": seed, "processes": processes, "flags": flags}
    result |= {"verdict": verdict(chosen, processes), "of_intervals": len(intervals), "time": round(time.time(), 3)}
    reasons = [f"{each.name}: {each.result}: {each.reason}" for each in chosen if each.reason]
    missing = " and ".join(name for name in ("metrics.jsonl", "ledger.jsonl") if not (run / name).exists())
    missing = missing and f"the run has no {missing}, so no lines of it were compared"
    result |= {"notes": [text for text in (claim, missing, *reasons, not_kept) if text]}
    result |= {
        "intervals": [each.found | {"from": each.begin, "to": each.end, "result": each.result} for each in chosen]
    }
    result |= {"versions": {name: metadata.version(name) for name in PACKAGES}}
    with writes_to(run, "RUN"):
        atomic_folder.rewrite(run / "audit.json", json.dumps(jsonl.strict_json(result), indent=1) + "\n")
        of_all = f"{result['verdict']}; of {len(intervals)} intervals, chosen by seed {seed}"
        add_to_card(run / "final", f"{LINE}{'; '.join(filter(None, (of_all, claim, missing)))}.")
    console.say("\n" + "\n".join([*result["notes"], result["verdict"], f"written to {run / 'audit.json'}"]))
    return code


def verdict(intervals: list[Interval], processes: int) -> str:
    """Return how many intervals were reproduced, and where."""
    results = [each.result for each in intervals]
    good = ROUNDED if ROUNDED in results else REPRODUCED
    were = " and ".join(map(str, sorted({each.state["identity"]["processes"] for each in intervals})))
    on = f"{processes} {'process' if processes == 1 else 'processes'} (the run had {were})"
    text = f"{sum(result in (REPRODUCED, ROUNDED) for result in results)} of {len(results)} intervals {good} on {on}"
    other = results.count(OTHER_KERNELS)
    return f"{text}; {other} {OTHER_KERNELS}" if other else text


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__.split("\n")[0])
    parser.add_argument("--segments", default="3")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("run", type=lambda text: Path(path_of_flag(text, "RUN")))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    return audit(options.run, options.segments, options.seed, options.command)


if __name__ == "__main__":
    smoke.end_at_signals()
    run_main(lambda argv: sys.exit(main(argv)))
