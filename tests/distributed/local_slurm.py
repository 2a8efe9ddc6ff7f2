"""A real Slurm on one machine, for any user and without services, to try the files of slurm/ before using a cluster.

    python -m tests.distributed.local_slurm sbatch --wait --nodes 2 slurm/train.sbatch configs/stdlib_lm.yaml     runs a command in it

Needs slurmctld, slurmd and Slurm's commands (Debian: slurmctld slurmd slurm-client). Everything is in one folder and on free
ports, and ends with the process that started it. Used by tests/distributed/test_slurm.py.
"""

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.helpers.ranks import free_port

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # Debian's folders of the daemons
NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "setpriv")
# A job of the partition `urgent` preempts jobs of `normal`, which are requeued. A requeued job waits cred_expire + 1 seconds.
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
ReturnToService=2
JobRequeue=1
KillWait={kill_wait}
FirstJobId={first}
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Return why Slurm cannot run here, or nothing."""
    absent = [name for name in NEEDED if not shutil.which(name, path=PATH)]
    if not absent:
        return ""
    return f"Slurm is not installed: no {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client)"


class Slurm:
    """A controller and nodes of four CPUs each, while a `with Slurm() as slurm:` block runs."""

    def __init__(self, nodes: int = 2, kill_wait: int = 20):
        self.nodes, self.kill_wait, self.daemons = nodes, kill_wait, []
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: it holds sockets
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.env |= {"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> "Slurm":
        host, ports = socket.gethostname().split(".")[0], [free_port() for _ in range(self.nodes + 1)]
        names = [f"n{number}" for number in range(1, self.nodes + 1)]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 State=UNKNOWN"
            for name, port in zip(names, ports[1:], strict=True)
        ]
        values = {"host": host, "port": ports[0], "user": pwd.getpwuid(os.getuid()).pw_name, "folder": self.folder}
        values |= {
            "kill_wait": self.kill_wait,
            "nodes": "\n".join(nodes),
            "first": random.SystemRandom().randrange(1000, 60_000),
        }
        (self.folder / "slurm.conf").write_text(CONF.format(**values))
        for name in ("state", *names):
            (self.folder / name).mkdir()
        try:
            self._start("slurmctld", "-c")
            for name in names:
                self._start("slurmd", "-N", name)
            deadline = time.monotonic() + 300
            while self("sinfo", "--noheader", "--format=%D %t", check=False).splitlines()[:1] != [f"{self.nodes} idle"]:
                if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self.daemons):
                    logs = [file.read_text()[-2000:] for file in sorted(self.folder.glob("*.log"))]
                    raise RuntimeError("Slurm does not start:\n" + "\n".join(logs))
                time.sleep(0.2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        """End all daemons and jobs at once."""
        for daemon in self.daemons:
            daemon.terminate()
        for _ in range(3):  # a process that ends may have started another one
            for pid in self._processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for daemon in self.daemons:
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _processes(self) -> list[int]:
        """Return the processes of this Slurm: its daemons, and its jobs with everything that they have started."""
        found, mark = [], str(self.folder)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                process = Path("/proc", pid)
                named = f"SLURM_CONF={mark}/".encode() in (process / "environ").read_bytes()
                if named or any(os.readlink(fd).startswith(mark) for fd in (process / "fd").iterdir()):
                    found.append(int(pid))
        return [pid for pid in found if pid != os.getpid()]

    def _start(self, daemon: str, *arguments: str) -> None:
        """Start a daemon that the kernel ends when this process dies."""
        command = ["setpriv", "--pdeathsig", "TERM", daemon, "-D", *arguments]
        quiet = subprocess.DEVNULL
        self.daemons.append(
            subprocess.Popen(command, env=self.env, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        )

    def __call__(self, *command, check: bool = True, env=None, cwd=None, timeout: float = 300) -> str:
        """Return what one of Slurm's commands prints; AssertionError if it fails."""
        words, options = (
            [str(word) for word in command],
            {"cwd": cwd, "env": self.env | (env or {}), "timeout": timeout},
        )
        done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()


def main(command: list[str]) -> int:
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with Slurm() as slurm:
        return subprocess.run(command or ["bash"], env=slurm.env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
