"""A real Slurm on one machine, for any user and without services, to try the files of cluster/slurm/ before using a cluster.

    python -m tests.engine.distributed.local_slurm sbatch --wait --nodes 2 cluster/slurm/train.sbatch configs/stdlib_lm.yaml     runs a command in it

Needs slurmctld, slurmd and Slurm's commands (Debian: slurmctld slurmd slurm-client). Everything is in one folder and on free
ports, and ends with the process that started it. Used by tests/engine/distributed/test_slurm.py.
"""

import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.helpers import kit

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # Debian's folders of the daemons
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
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
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
    is_here = all(shutil.which(name, path=PATH) for name in ("slurmctld", "slurmd", "sbatch", "setpriv"))
    return "" if is_here else "Slurm is not installed (apt-get install slurmctld slurmd slurm-client)"


class Slurm:
    """A controller and nodes of four CPUs each, while a `with Slurm() as slurm:` block runs."""

    def __init__(self, nodes: int = 2):
        self.names, self.daemons = [f"n{number}" for number in range(1, nodes + 1)], []
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: it holds sockets
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.env |= {"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> "Slurm":
        host = socket.gethostname().split(".")[0]
        at = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=4000 State=UNKNOWN"
        nodes = [f"NodeName={name} Port={kit.free_port()} {at}" for name in self.names]
        values = {"host": host, "port": kit.free_port(), "user": pwd.getpwuid(os.getuid()).pw_name}
        values |= {"nodes": "\n".join(nodes), "first": random.SystemRandom().randrange(1000, 60_000)}
        Path(self.env["SLURM_CONF"]).write_text(CONF.format(folder=self.folder, **values))
        for name in ("state", *self.names):
            (self.folder / name).mkdir()
        try:
            self._start("slurmctld", "-c")
            for name in self.names:
                self._start("slurmd", "-N", name)
            kit.until(self._is_ready)
        except BaseException:
            print(*(file.read_text()[-2000:] for file in self.folder.glob("*.log")), file=sys.stderr)
            self.__exit__()
            raise
        return self

    def _is_ready(self) -> bool:
        assert all(daemon.poll() is None for daemon in self.daemons), "a daemon of Slurm does not start"
        states = self("sinfo", "--noheader", "--format=%D %t", check=False).splitlines()
        return states[:1] == [f"{len(self.names)} idle"]

    def __exit__(self, *_) -> None:
        """End all daemons and jobs at once."""
        for daemon in self.daemons:
            daemon.terminate()
        for _ in range(3):  # a process that ends may have started another one
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if self._owns(process):
                        process.kill()
            time.sleep(0.1)
        for daemon in self.daemons:
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _owns(self, process: psutil.Process) -> bool:
        """Return whether this is one of its daemons, or a job with everything that it has started."""
        is_named = process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]
        return is_named or any(file.path.startswith(str(self.folder)) for file in process.open_files())

    def _start(self, daemon: str, *arguments: str) -> None:
        """Start a daemon that the kernel ends when this process dies."""
        command = ["setpriv", "--pdeathsig", "TERM", daemon, "-D", *arguments]
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.daemons.append(subprocess.Popen(command, env=self.env, **quiet, start_new_session=True))

    def __call__(self, *command, check: bool = True, env=None, cwd=None, timeout: float = 300) -> str:
        """Return what one of Slurm's commands prints; AssertionError if it fails."""
        options = {"cwd": cwd, "env": self.env | (env or {}), "timeout": timeout}
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()


def main(command: list[str]) -> int:
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with Slurm() as slurm:
        return subprocess.run(command or ["bash"], env=slurm.env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
