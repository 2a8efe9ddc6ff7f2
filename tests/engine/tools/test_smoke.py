"""`make smoke`: what a resumed run would not have is found in three steps; a sound run passes under every backend."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from engine.process import run_status
from engine.tools import smoke
from src.tasks import causal_lm
from tests.conformance import mutants
from tests.helpers import kit, plain_task

SMOKE = "engine/tools/smoke.py"
CPU = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file"]
CPU += [kit.REPOSITORY / "accelerate_configs" / "cpu.yaml"]


@pytest.fixture
def ranks(monkeypatch):
    """A function: from now on, commands of a smoke test run in forked ranks instead of a launcher, which takes seconds."""

    def use(world: int, env=None) -> None:
        def run_command(words, variables):
            os.environ |= variables
            script = os.path.relpath(words[1], kit.REPOSITORY) if Path(words[1]).is_absolute() else words[1]
            if "encoded_rows" in script:  # a new process does not know the task of a test
                return 0
            out = Path(f"launch_{len(list(Path().glob('launch_*')))}").absolute()
            processes = kit.fork(world, kit._command, script, words[2:], Path.cwd(), out=out, env=env)
            for process in processes:
                process.join()
            print((out / "rank0.txt").read_text())
            return max(process.exitcode for process in processes)

        monkeypatch.setattr(smoke, "run_command", run_command)

    return use


def smoke_test(argv: list[str], folder: Path) -> tuple[int, str]:
    """Return (exit code, output) of a smoke test in `folder`."""
    [code], [text] = kit.run_command(SMOKE, "train.py", *argv, folder=folder)
    return code, text


LAUNCHES = [(None, 1), ("ddp", 2), pytest.param("fsdp2", 2, marks=pytest.mark.cluster)]


@pytest.mark.parametrize("backend, world", LAUNCHES)
def test_sound_run_passes(plain, tmp_path, ranks, backend, world):
    """With batch norm, dropout, a warmup, and an average if the add-on is here; the run's own checkpoints are neither
    read nor written."""
    env = kit.where(backend, world, mixed_precision="no") if backend else None
    fields = {"metric_for_best_model": "accuracy", "norm": True}
    if kit.has_addon("techniques/ema"):  # not in each fork
        fields["techniques"] = '{"ema": {"final": true}}'
    argv = plain_task.flags(plain, per_device_batch_size=4, warmup_steps=5, **fields)
    own = kit.run_training(world, tmp_path / "here" / "run", *argv, env=env)
    files = [path for path in own.folder.rglob("*") if path.is_file()]
    before = [path.stat().st_mtime_ns for path in files]
    ranks(world, env)
    code, text = smoke_test([*argv, "--output_dir", "run"], tmp_path / "here")
    assert code == 0, text
    assert text.rstrip().endswith("and so is the step after it\nsmoke: passed")
    assert "depend on per_device_batch_size" not in text
    assert "costs of the whole run" in text
    assert [path.stat().st_mtime_ns for path in files] == before
    first, resumed = (
        [json.loads(line) for line in (own.folder / ".smoke" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("first", "resumed")
    )
    steps = [("train", 1), ("train", 2), ("train", 3), ("eval", 3)]
    assert [(line["kind"], line["step"]) for line in first] == steps
    assert [(line["kind"], line["step"]) for line in resumed] == steps[2:]
    assert [line["loss"] for line in first[:3]] == own.losses()[:3]  # the first steps of the run itself
    assert not list((own.folder / ".smoke").rglob("checkpoints"))


@pytest.mark.cluster
@pytest.mark.parametrize("world", [1, 2])
def test_command_with_a_launcher(plain_files, tmp_path, world):
    """As `make smoke` starts it. Two processes: by the accelerate file of two."""
    command = [*CPU[:-1], CPU[-1].with_name("cpu.yaml" if world == 1 else "cpu_ddp.yaml")]
    command += [kit.REPOSITORY / "train.py", *plain_files, "--output_dir", tmp_path / "run"]
    done = run_smoke(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("smoke: passed\n")
    environment = json.loads((tmp_path / "run" / ".smoke" / "first" / "environment.json").read_text())
    assert environment["world_size"] == world


@pytest.fixture
def plain_files(tiny) -> list[str]:
    values = {"max_steps": 9, "global_batch_size": 8, "per_device_batch_size": 4}
    return kit.flags(**tiny, **values)


def run_smoke(command: list) -> subprocess.CompletedProcess:
    """Run the smoke test of a command, with real processes."""
    words = [sys.executable, "-m", "engine.tools.smoke", *map(str, command)]
    return subprocess.run(words, cwd=kit.REPOSITORY, env=kit.PLAIN_ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.cluster
@pytest.mark.parametrize(
    "fields, words",
    [
        ({"max_steps": 3}, "max_steps: a smoke test trains 3 steps of a longer run, but this run has only 3"),
        pytest.param({"train_file": "missing.jsonl"}, "missing.jsonl", marks=pytest.mark.cluster),
    ],
)
def test_usage_error_is_printed_once(tiny, tmp_path, fields, words):
    """Of this process, or of a command that it runs; the exit code is that of the command."""
    values = {"max_steps": 9, "global_batch_size": 8, "per_device_batch_size": 4, "output_dir": tmp_path / "run"}
    done = run_smoke([kit.REPOSITORY / "train.py", *kit.flags(**tiny | values | fields)])
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count(words) == 1


def test_command_that_does_not_train_is_refused(tmp_path):
    code, text = kit.run_command(SMOKE, "accelerate", "launch", "eval.py", folder=tmp_path)
    assert code == [2]
    assert "accelerate launch eval.py does not run train.py: give the command that trains" in text[0]


@pytest.mark.cluster
def test_signal_ends_the_test_and_the_command(tiny, tmp_path):
    """The command saves, as after any signal; that is no state to go on with."""
    values = {"max_steps": 10**6, "global_batch_size": 8, "per_device_batch_size": 4, "output_dir": tmp_path / "run"}
    words = [sys.executable, "-m", "engine.tools.smoke", kit.REPOSITORY / "train.py", *kit.flags(**tiny | values)]
    process = subprocess.Popen(
        [str(word) for word in words],
        cwd=kit.REPOSITORY,
        env=kit.PLAIN_ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    kit.until((tmp_path / "run" / ".smoke" / "first").exists)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 75, text
    assert text.rstrip().endswith("Stopped by SIGTERM: a smoke test has nothing to save.")
    assert run_status.read_status(tmp_path / "run") == {}


INTERRUPTED = """
import os, signal, subprocess, sys
from engine.tools import smoke

class Interrupted(subprocess.Popen):
    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        started.append(self)
        signal.raise_signal(signal.SIGTERM)

started = []
subprocess.Popen = Interrupted
smoke.end_at_signals()
try:
    smoke.run_command([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ))
except smoke.Stopped as stopped:
    print(stopped, [process.poll() for process in started])
for process in started:
    process.kill()
"""


@pytest.mark.cluster
def test_signal_while_a_command_starts_ends_it():
    """In a process of its own, whose signals these are."""
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, cwd=kit.REPOSITORY, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == f"Stopped by SIGTERM: a smoke test has nothing to save. [{-signal.SIGTERM}]\n", done.stderr


# ---- tasks of a fork -------------------------------------------------------------------------------------------------


class WithParameter(causal_lm.Task):
    """Adds a parameter that GPT2LMHeadModel does not have: from_pretrained drops it."""

    def build(self, weights=None, empty=False):
        model = super().build(weights, empty)
        model.extra = torch.nn.Parameter(torch.ones(3))
        return model

    def loss(self, model, inputs):
        sums = super().loss(model, inputs)
        return sums | {"loss": sums["loss"] + model.extra.sum()}


class WithBuffer(causal_lm.Task):
    """Adds a buffer that training changes."""

    def build(self, weights=None, empty=False):
        model = super().build(weights, empty)
        model.register_buffer("extra", torch.zeros(3))
        model.base_model.register_forward_pre_hook(lambda *_: count(model))
        return model


def count(model) -> None:
    model.extra += model.training


class RandomMetric(causal_lm.Task):
    def metrics(self, sums, weight):
        return {"accuracy": random.SystemRandom().random()}


class Padded(causal_lm.Task):
    """The loss of a row depends on the padding."""

    def loss(self, model, inputs):
        sums = super().loss(model, inputs)
        return sums | {"loss": sums["loss"] * inputs["input_ids"].shape[1]}


class SavesLater(causal_lm.Task):
    """Its save_pretrained ignores state_dict, as that of some libraries: it saves what training changes meanwhile."""

    def build(self, weights=None, empty=False):
        model = super().build(weights, empty)
        original, saves = model.save_pretrained, []

        def save(folder, state_dict=None, **_):
            saves.append(folder)
            if len(saves) == 1:  # nothing may be trained during a later one
                kit.until(lambda: not any(torch.equal(p, state_dict[name]) for name, p in model.named_parameters()))
            original(folder)

        model.save_pretrained = save
        return model


class CountsBackwardPasses(causal_lm.Task):
    """Its gradient depends on a number that no checkpoint holds: only a step after a resume shows it."""

    def build(self, weights=None, empty=False):
        model = super().build(weights, empty)
        self.passes = 0
        next(model.parameters()).register_hook(self.scale)
        return model

    def scale(self, gradient):
        self.passes += 1
        return gradient * self.passes


def flags_of_fork(tiny, **fields) -> list[str]:
    values = {"task": "fork", "max_steps": 9, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    values |= {"global_batch_size": 8, "per_device_batch_size": 4, "output_dir": "run"}
    return kit.flags(**tiny, **values, **fields)


def registered(kind: type):
    return plain_task.registered(types.SimpleNamespace(Options=causal_lm.Options, Task=kind), "fork")


LOADED, STEP = "when it is loaded: ", "after step 3: "


@pytest.mark.parametrize(
    "kind, world, words",
    [
        (WithParameter, 2, f"{LOADED}model/extra: "),
        (WithBuffer, 1, f"{LOADED}model/extra: "),
        (causal_lm.Task, 1, f"{LOADED}optimizer/exp_avg/"),
        (CountsBackwardPasses, 1, f"{STEP}model/"),
    ],
)
def test_what_does_not_come_back_is_named(tiny, tmp_path, monkeypatch, ranks, kind, world, words):
    if "optimizer" in words:
        monkeypatch.setattr("engine.distributed.backends.Backend.load_moments", lambda *_: None)
    ranks(world)
    with registered(kind):
        code, text = smoke_test(flags_of_fork(tiny), tmp_path / "here")
    assert code == 2, text
    assert words in text.rstrip().splitlines()[-1]
    assert (tmp_path / "here" / "run" / ".smoke" / "resumed" / "checkpoints").exists()  # to look at


def test_step_after_a_resume_is_not_compared_where_it_may_round(tiny, tmp_path, monkeypatch, ranks):
    """On a GPU: sums of attention may be added in any order. What is loaded is compared everywhere."""
    monkeypatch.setattr(smoke, "why_steps_differ", lambda *_: "kernels on cuda may add in any order")
    ranks(1)
    with registered(CountsBackwardPasses):
        code, text = smoke_test(flags_of_fork(tiny), tmp_path / "here")
    assert code == 0, text
    assert "but not compared after another step, because kernels on cuda may add in any order" in text
    with registered(WithBuffer):
        code, text = smoke_test(flags_of_fork(tiny), tmp_path / "here")
    assert code == 2, text


@pytest.mark.parametrize(
    "kind, world, words",
    [
        (mutants.NumpyGenerator, 2, "`collate` returns another x for the same rows and the same seed"),
        (mutants.TorchSeedInLoss, 1, "`loss` seeds torch"),
        (mutants.MeanLoss, 1, "`loss` of `loss` in training is"),
        (mutants.MeanInEvaluation, 1, "`right` of `loss` in evaluation is"),
    ],
)
def test_mistake_of_a_task_is_named_before_the_first_step(plain, tmp_path, ranks, kind, world, words):
    """The sentence is printed once; more mutants are in tests/conformance/test_mistakes.py."""
    ranks(world)
    argv = plain_task.flags(plain, task="fork", output_dir="run")
    with plain_task.registered(types.SimpleNamespace(Options=plain_task.Options, Task=kind), "fork"):
        code, text = smoke_test(argv, tmp_path / "here")
    assert code == 1, text
    assert text.count(f"task fork (tests/conformance/mutants.py): {words}") == 1
    assert not (tmp_path / "here" / "run").exists()


def test_evaluation_that_is_not_repeatable_is_named(tiny, tmp_path, ranks):
    ranks(2)
    with registered(RandomMetric):
        code, text = smoke_test(flags_of_fork(tiny), tmp_path / "here")
    assert code == 2, text
    assert "differs from the run that it continues" in text
    assert "evaluation/accuracy: " in text


def test_rows_that_depend_on_each_other_are_named(tiny, tmp_path, ranks):
    ranks(1)
    with registered(Padded):
        code, text = smoke_test(flags_of_fork(tiny), tmp_path / "here")
    assert code == 0, text
    assert "depend on per_device_batch_size" in text


def test_checkpoint_of_later_weights_is_refused(tiny, tmp_path):
    with registered(SavesLater):
        codes, texts = kit.run_command("train.py", *flags_of_fork(tiny, save_steps=3), folder=tmp_path / "here")
    assert codes == [1], texts
    assert "training changes the model meanwhile" in texts[0]
    assert not (tmp_path / "here" / "run" / "checkpoints" / "step_00000003").exists()


# ---- encode, in processes of its own -----------------------------------------------------------------------------------

ENCODE = """
import os, random
from datetime import date, datetime

import numpy as np

from src.tasks import causal_lm

Options = causal_lm.Options


class Task(causal_lm.Task):
    def encode(self, batch, locations):
        rows = super().encode(batch, locations)
        value = CHANGE
        rows["input_ids"] = [[int(value) % 50, *ids[1:]] for ids in rows["input_ids"]]
        return rows
"""
CHANGES = {
    "np.random.default_rng().integers(50)": "another input_ids of train data, input_ids of validation data in another process",
    "[*set(map(str, range(50)))][0]": "another input_ids",
    "date.today().toordinal()": "another input_ids",
    "datetime.now().microsecond": "another input_ids",
    "os.environ.get('SHIFT', 0)": "reads the environment variable SHIFT",
    "os.getenv('SHIFT', 0)": "reads the environment variable SHIFT",
    "7": "",
}


@pytest.mark.cluster
@pytest.mark.parametrize("change", CHANGES)
def test_encode_that_depends_on_its_process_is_named(tiny, tmp_path, change):
    """By this check alone, in a copy of the core with such a task; the sound one is found sound."""
    copy = tmp_path / "copy"
    for name in ("engine", "src", "tests/conformance"):
        shutil.copytree(kit.REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "src" / "tasks" / "fork.py").write_text(ENCODE.replace("CHANGE", change))
    program, env = copy / "tests" / "conformance" / "encoded_rows.py", kit.PLAIN_ENVIRONMENT | {"PYTHONPATH": str(copy)}
    command = [sys.executable, program, *kit.flags(**tiny, task="fork", cache_dir=tmp_path / "cache")]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    assert bool(done.returncode) == (change != "7"), done.stderr[-2000:]
    assert CHANGES[change] in done.stderr
