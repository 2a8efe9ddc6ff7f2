"""Smoke test of a run: the conformance checks of its task, three steps, a resume at step 2, the states of step 3 compared.

    python -m engine.tools.smoke accelerate launch --config_file accelerate_configs/cpu.yaml train.py --config FILE [flags]

Any command that trains may follow; `make smoke` gives that of `make train`. It is run twice, in OUTPUT_DIR/.smoke, and
before in its place the checks of tests/conformance/; nothing else of the run folder is read or written.
Tests: tests/engine/tools/test_smoke.py.
"""

from engine import startup

if __name__ == "__main__":
    startup.begin(has_help=False)  # before the slow imports: checks the installation, ends at Ctrl-C

# isort: split
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from engine.checkpointing.checkpoint_folder import read_state
from engine.checkpointing.tensor_files import TensorReader, digest
from engine.config import parsing
from engine.config.addresses import local_folder
from engine.config.errors import Failure, Stopped, UsageError, warn
from engine.config.paths import REPOSITORY
from engine.config.run_config import RunConfig
from engine.distributed.stop_signals import SIGNALS
from engine.find_tasks import OPTIONS
from engine.process import console, run_status
from engine.process.exit_codes import STOP_IS_SUCCESS, run_main
from engine.storage import jsonl
from engine.tools.costs_of_run import describe_costs

STEPS = 3  # of each run; the second one resumes at the step before the last
EVAL_BATCHES = 4  # micro-batches of each evaluation
TIMES = ("seconds", "data_seconds")  # in the meter of a checkpoint
CHECKS = REPOSITORY / "tests" / "conformance"
arrived: list[int] = []  # signals
running: list[subprocess.Popen] = []  # commands; to end one that has ended does nothing
USAGE = "give the command that trains: python -m engine.tools.smoke accelerate launch … train.py --config FILE"


def main(argv: list[str]) -> None:
    """Check the task, then run train.py twice, the second time from a checkpoint of the first, and compare.

    Raise UsageError if a resumed run has another state. An error of a command that is run ends this one, too."""
    launcher, script, argv = split_command(argv)
    argv = parsing.with_default_config(argv)
    cfg, _ = parsing.parse(argv, OPTIONS)
    folder = Path(local_folder(cfg.output_dir)) / ".smoke"
    first, resumed = folder / "first", folder / "resumed"
    flags = [*argv, *flags_of_test(cfg)]
    shutil.rmtree(folder, ignore_errors=True)

    if (CHECKS / "smoke_task.py").exists():
        console.say("smoke: the task")
        launch([*launcher, str(CHECKS / "smoke_task.py"), *flags, "--output_dir", str(folder)], folder)
        launch([sys.executable, str(CHECKS / "encoded_rows.py"), *flags], folder)
    else:
        warn(f"smoke: the task is not checked, because {CHECKS} is not here")
    console.say(f"\nsmoke: {STEPS} steps")
    train([*launcher, script, *flags], first, "auto")
    console.say(f"\nsmoke: a resume at step {STEPS - 1}")
    resumed.mkdir(parents=True)
    (resumed / "save").touch()  # before its first step: the state as it was loaded
    train([*launcher, script, *flags], resumed, str(checkpoint(first, STEPS - 1)))

    count = compare(state_at(first, STEPS - 1), state_at(resumed, STEPS - 1), "when it is loaded")
    reason = why_steps_differ(cfg, first)
    if not reason:
        last = state_at(first, STEPS) | lines_at(first, STEPS)
        count += compare(last, state_at(resumed, STEPS) | lines_at(resumed, STEPS), f"after step {STEPS}")
    console.say(describe_costs(cfg, first, checkpoint(first, STEPS)))
    for each in (first, resumed):
        shutil.rmtree(each / "checkpoints")
    skipped = f", but not compared after another step, because {reason}" if reason else ", and so is the step after it"
    console.say(f"\n{count} tensors, numbers and metrics are equal after a resume, bit by bit{skipped}\nsmoke: passed")


def split_command(argv: list[str]) -> tuple[list[str], str, list[str]]:
    """Return (launcher, path of train.py, its flags) of a command that trains."""
    places = [place for place, word in enumerate(argv) if Path(word).name == "train.py"]
    if not places:
        raise UsageError(f"{' '.join(argv) or 'the command'} does not run train.py: {USAGE}")
    launcher = argv[: places[0]] or [sys.executable]
    return launcher, argv[places[0]], argv[places[0] + 1 :]


def flags_of_test(cfg: RunConfig) -> list[str]:
    """Return the flags by which a smoke test differs from the run: what is saved and evaluated when, and no trackers."""
    rows = EVAL_BATCHES * cfg.per_device_eval_batch_size
    values = {"max_eval_examples": min(cfg.max_eval_examples or rows, rows), "logging_steps": 1}
    values |= {"eval_steps": STEPS, "save_steps": STEPS - 1, "save_total_limit": 2}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return words + (["--report_to", "none"] if cfg.report_to else [])


# ---- commands --------------------------------------------------------------------------------------------------------


def train(command: list[str], folder: Path, resume: str) -> None:
    """Run train.py in `folder` until step STEPS, which it saves; on the schedule of the whole run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stop").write_text(str(STEPS))
    launch([*command, "--output_dir", str(folder), "--resume", resume], folder)
    checkpoint(folder, STEPS)


def checkpoint(folder: Path, step: int) -> Path:
    """Return the checkpoint of a step; raise Failure if a run has not saved it."""
    path = folder / "checkpoints" / f"step_{step:08d}"
    if not path.exists():
        raise Failure(f"smoke: there is no {path}: see the lines above")
    return path


def launch(words: list[str], folder: Path) -> None:
    """Run a command; end with its exit code if it fails, without a message: it has printed its own."""
    code = run_command(words, environment() | {STOP_IS_SUCCESS: "1"})
    if code:
        recorded = run_status.read_status(folder).get("exit_code")  # launchers know only 0 and 1
        sys.exit(recorded or (128 - code if code < 0 else code))


def end_at_signals() -> None:
    """From now on a signal ends the command that runs, also one that is being started; then this process."""

    def stop(number: int, frame: object) -> None:
        arrived.append(number)
        for process in running:
            process.terminate()

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def environment() -> dict[str, str]:
    """Return the environment of a command that finds this repository from any folder."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run_command(words: list[str], env: dict[str, str]) -> int:
    """Return the exit code of a command; raise Stopped if a signal has come."""
    with subprocess.Popen(words, env=env) as process:
        running.append(process)
        if arrived:
            process.terminate()
        code = process.wait()
    if arrived:
        raise Stopped(f"Stopped by {signal.Signals(arrived[0]).name}: a smoke test has nothing to save.")
    return code


# ---- comparison ------------------------------------------------------------------------------------------------------
def state_at(folder: Path, step: int) -> dict[str, str]:
    """Return {PART/NAME: hash or value} of all that the checkpoint of a step restores, except times."""
    path = checkpoint(folder, step)
    state = read_state(path)
    values = {}
    files = {re.sub(r"-\d+-of-\d+$", "", file.stem) for file in path.glob("*.safetensors")}  # add-ons have their own
    for part in sorted({"model", *state["numbers"], *files}):
        reader = TensorReader(path, part)
        values |= {f"{part}/{name}": digest(reader.full(name)) for name in reader.where}
    parts = state["numbers"] | {"progress": state["progress"], "meter": state["meter"], "scaler": state["scaler"] or {}}
    for part, named in parts.items():
        values |= {f"{part}/{name}": json.dumps(value) for name, value in named.items() if name not in TIMES}
    return values


def lines_at(folder: Path, step: int) -> dict[str, str]:
    """Return the loss of a step, and the metrics of its evaluation, as metrics.jsonl has them."""
    values = {}
    for line in jsonl.read_lines(folder / "metrics.jsonl"):
        if line["step"] == step and line["kind"] == "train":
            values["training/loss"] = json.dumps(line["loss"])
        if line["step"] == step and line["kind"] == "eval":
            values |= {f"evaluation/{name}": json.dumps(value) for name, value in line.items()}
    return values


def why_steps_differ(cfg: RunConfig, folder: Path) -> str:
    """Return why a step after a resume may round differently, or nothing if it must be bitwise the same."""
    device = jsonl.read_json(folder / "environment.json")["device"].split()[0]
    if device != "cpu":
        return f"kernels on {device} may add in any order"
    if cfg.compile:
        return "torch compiles for the shapes that a process has met"
    if cfg.ddp_comm_hook.endswith("power_sgd"):
        return f"no checkpoint holds the errors of {cfg.ddp_comm_hook}"
    return ""


def compare(old: dict[str, str], new: dict[str, str], when: str) -> int:
    """Return the number of values; raise UsageError that names the first of those that differ."""
    differ = [name for name in old | new if old.get(name) != new.get(name)]
    if differ:
        shown = [f"{name}: {old.get(name, 'absent')} → {new.get(name, 'absent')}" for name in differ[:3]]
        raise UsageError(
            f"smoke: a resumed run differs from the run that it continues in {len(differ)} values {when}: {'; '.join(shown)}. "
            "`build(weights)` of the task must return the model that was saved (from_pretrained drops a parameter or buffer "
            "that the model class does not have), `state_dict` of a technique must hold all that its next step depends on, "
            "and an evaluation must give the same numbers twice"
        )
    return len(old)


if __name__ == "__main__":
    end_at_signals()
    run_main(main)
