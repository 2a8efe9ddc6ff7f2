"""Jobs for tests/distributed/test_slurm.py: a project to submit from, real launchers or a fake one, states of a job."""

import sys
import time
from pathlib import Path

from tests.distributed.local_slurm import Slurm
from tests.helpers import kit

SCRIPTS = sorted((kit.REPOSITORY / "slurm").glob("*.sbatch"))
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
# A fake `accelerate`: runs the code in the file `behavior` of the run folder, or prints its arguments.
FAKE_ACCELERATE = f"""#!{sys.executable} -IS
import os, signal, sys, time
OUT, ENV = os.environ["OUT"], os.environ

def end(code, step=1):
    os.makedirs(f"{{OUT}}/checkpoints/step_{{step:08d}}", exist_ok=True)
    with open(f"{{OUT}}/status.json", "w") as file:
        file.write('{{"status": "fake run", "step": %d, "exit_code": %d, "reason": ""}}' % (step, code))
    sys.exit(min(code, 1))

if os.path.exists(f"{{OUT}}/behavior"):
    exec(open(f"{{OUT}}/behavior").read())
else:
    print("node", ENV["SLURM_NODEID"], "of", ENV["HEAD"], *sys.argv[1:])
"""
# Waits for a signal and ends as a stopped run; completes after a requeue.
WAIT_FOR_SIGNAL = """
if "SLURM_RESTART_COUNT" in ENV:
    end(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: end(75))
print("waiting", flush=True)
time.sleep(600)
"""


def make_project(folder: Path, remove: str = "") -> Path:
    """Return a folder to submit from: this project without .venv; for a mutant, its slurm files lack `remove`."""
    folder.mkdir(parents=True)
    for name in ("train.py", "src", "accelerate_configs"):
        (folder / name).symlink_to(kit.REPOSITORY / name)
    (folder / "slurm").mkdir()
    for script in SCRIPTS:
        text = script.read_text()
        if remove:
            assert remove in text or script.name != "train.sbatch"
            text = text.replace(remove, ":")
        (folder / "slurm" / script.name).write_text(text)
    kit.write_yaml(folder / "x.yaml", {})
    return folder


class Job:
    """A job, submitted from a folder; `fake` is the behavior of a fake launcher ("": print its arguments)."""

    def __init__(self, slurm: Slurm, folder: Path, *command, fake: str | None = None, **env):
        self.slurm, self.output = slurm, folder / "output.txt"
        self.folder = folder / "run"
        path = f"{Path(sys.executable).parent}:{slurm.env['PATH']}"
        if fake is not None:
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / "accelerate").write_text(FAKE_ACCELERATE)
            (folder / "bin" / "accelerate").chmod(0o755)
            path = f"{folder / 'bin'}:{path}"
        if fake:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "behavior").write_text(fake)
        sbatch = ["sbatch", "--parsable", "--output", self.output, *command]
        self.id = slurm(*sbatch, env={"PATH": path, "OUT": str(folder / "run")} | env, cwd=folder)

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def state(self) -> tuple[str, int, str]:
        """Return (state, requeues, exit code)."""
        words = self.slurm("scontrol", "--oneliner", "show", "job", self.id).split()
        job = dict(word.split("=", 1) for word in words if "=" in word)
        return job["JobState"], int(job["Restarts"]), job["ExitCode"].split(":")[0]

    def end(self, condition=lambda: False) -> tuple[str, int, str]:
        """Return the state when `condition` is true or the job has ended; asks rarely, because that slows the other jobs."""
        kit.until(lambda: condition() or (time.sleep(0.3) or self.state()[0] in ENDED))
        return self.state()

    def until_step(self, step: int) -> int:
        """Return the step of the run when it has reached `step`."""
        self.end(lambda: kit.last_step(self.folder) >= step)
        assert kit.last_step(self.folder) >= step, self.text()
        return kit.last_step(self.folder)
