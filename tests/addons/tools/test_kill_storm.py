"""`make storm`: its exit code and its last line."""

import subprocess
import sys

from tests.helpers import kit


def test_command_kills_and_compares(tiny):
    fields = tiny | {"max_steps": 30, "eval_steps": 20, "per_device_batch_size": 4, "global_batch_size": 8}
    config = kit.write_yaml(
        tiny["train_file"].parent / "storm.yaml",
        {name: str(v) if hasattr(v, "parent") else v for name, v in fields.items()},
    )
    command = [sys.executable, "-m", "addons.tools.kill_storm", "--config", config, "--kills", "1", "--seed", "1"]
    done = subprocess.run(command, cwd=kit.REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 kills on 1 process(es)")
    assert "bitwise equal, every line once" in done.stdout
