"""Kill a run at random moments, again and again, and compare it with one that nobody disturbed.

    python -m tests.helpers.kill_storm --config configs/stdlib_lm.yaml --kills 20 --nproc 2 [--minutes 10] [--flag value …]    (make storm)

The whole job gets SIGKILL, at any moment: while it starts, trains, evaluates, copies, writes, renames or prunes. In the end
weights must be equal to the last bit, no line of metrics.jsonl missing, twice or different, and every step of the ledger the
plan's. A fork runs it on its own task. Guarded by tests/checkpointing/test_kill_storm.py.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from src.reporting import ledger
from src.storage import atomic_folder
from tests.helpers import kit

TIMES = ("second",)  # parts of the names of numbers that no two runs share


def _train(argv: list[str]) -> None:
    from src.runtime.exit_codes import run_main

    sys.argv = ["train.py", *argv]
    run_main(__import__("train").main)


def run(argv: list, folder: Path, world: int, doomed=None, deadline: float = float("inf")) -> bool:
    """Train in `folder` until the end, or until `doomed(seconds since the start)` and everything is killed; return which."""
    started, killed = time.monotonic(), False
    ranks = kit.fork(world, _train, [*map(str, argv), "--output_dir", str(folder)], out=folder.with_suffix(".out"))
    while any(rank.is_alive() for rank in ranks):
        if time.monotonic() > deadline or (doomed and doomed(time.monotonic() - started)):
            killed = True
            for rank in ranks:
                rank.kill()
            break
        time.sleep(0.005)
    for rank in ranks:
        rank.join()
    if not killed and any(rank.exitcode for rank in ranks):
        texts = [file.read_text() for file in sorted(folder.with_suffix(".out").glob("*.txt"))]
        raise kit.RankFailed([rank.exitcode for rank in ranks], texts)
    return not killed


def timeless(run: kit.Run) -> list[dict]:
    return [{k: v for k, v in line.items() if not any(part in k for part in TIMES)} for line in run.lines]


def differences(straight: Path, killed: Path) -> list[str]:
    """Return what in the killed run is not as in the other: nothing, if the project keeps its promise."""
    one, two = kit.Run(straight), kit.Run(killed)
    found = (
        []
        if kit.same(one.weights, two.weights)
        else [f"final weights differ by {kit.distance(one.weights, two.weights):.1e}"]
    )
    steps = [(line["kind"], line["step"]) for line in two.lines]
    found += [f"{kind} line of step {step} is there twice" for kind, step in {s for s in steps if steps.count(s) > 1}]
    wanted = [(line["kind"], line["step"]) for line in one.lines]
    found += [f"{kind} line of step {step} is missing" for kind, step in set(wanted) - set(steps)]
    if not found and timeless(one) != timeless(two):
        found.append("some line of metrics.jsonl differs in more than its times")
    found += [text for text in (ledger.compare(killed), ledger.compare(killed, straight)) if text]
    return found + [f"final: {fault}" for fault in atomic_folder.verify(killed / "final")]


def storm(argv: list, folder: Path, world: int, kills: int, minutes: float = 60, seed: int | None = None) -> dict:
    """Return kills that met a living job, seconds, and the differences between the killed run and the undisturbed one."""
    rng = random.Random(seed)
    began = time.monotonic()
    deadline = began + 60 * minutes
    straight, killed = folder / "straight", folder / "killed"
    run(argv, straight, world, deadline=deadline)
    total, done = kit.last_step(straight), 0
    while done < kills and time.monotonic() < deadline:
        if rng.random() < 0.2:  # somewhere while it starts
            moment = rng.uniform(0, 1.0)
            doomed = lambda lived: lived > moment  # noqa: E731, B023
        else:  # somewhere in the steps, so that the kills are spread over the whole run
            last = kit.last_step(killed)
            step, rest = last + rng.uniform(0, 2 * (total - last) / (kills - done)), rng.uniform(0, 0.05)
            reached = []

            def doomed(lived):
                if kit.last_step(killed) >= min(step, total - 1):  # noqa: B023
                    reached.append(lived)  # noqa: B023
                return bool(reached) and lived - reached[0] >= rest  # noqa: B023

        if run(argv, killed, world, doomed, deadline):
            break  # it was faster, and is complete
        done += 1
    run(argv, killed, world, deadline=deadline)
    return {"kills": done, "seconds": time.monotonic() - began, "differences": differences(straight, killed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=None)
    own, flags = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        argv = ["--config", own.config, "--logging_steps", "1", "--save_steps", "2", *flags]
        found = storm(argv, Path(folder), own.nproc, own.kills, own.minutes, own.seed)
    for text in found["differences"]:
        print(text)
    verdict = "DIFFERENT" if found["differences"] else "bitwise equal, every line once"
    print(f"{found['kills']} kills on {own.nproc} process(es) in {found['seconds']:.0f} s: {verdict}")
    return 1 if found["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
