"""Kill a run at random moments, again and again, and compare it with one that was not disturbed.

The whole job gets SIGKILL at any moment: while it starts, trains, evaluates, copies, writes, renames or prunes. At the end
the weights must be equal to the last bit, no line of metrics.jsonl missing, repeated or different, and every step of the
ledger that of the plan. `make storm` runs it on any task. Tests: tests/engine/checkpointing/test_kill_storm.py.
"""

import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

from engine.storage import verify_hashes
from tests.helpers import kit


def _train(argv: list[str]) -> None:
    from engine.process.exit_codes import run_main

    sys.argv = ["train.py", *argv]
    run_main(__import__("train").main)


def run(
    argv: list, folder: Path, world: int, kill_at: tuple[float, float] | None = None, deadline: float = float("inf")
) -> bool:
    """Train in `folder` until the end, or kill all ranks so many seconds after a step, (step, seconds); return whether it ended."""
    ranks = kit.fork(world, _train, [*map(str, argv), "--output_dir", str(folder)], out=folder.with_suffix(".out"))
    killed, reached = False, None
    while not killed and any(rank.is_alive() for rank in ranks):
        now = time.monotonic()
        if kill_at and reached is None and kit.last_step(folder) >= kill_at[0]:
            reached = now
        killed = now > deadline or bool(reached and now - reached >= kill_at[1])
        time.sleep(0.005)
    for rank in ranks:
        if killed:
            rank.kill()
        rank.join()
    if not killed and any(rank.exitcode for rank in ranks):
        texts = [file.read_text() for file in sorted(folder.with_suffix(".out").glob("*.txt"))]
        raise kit.RankFailed([rank.exitcode for rank in ranks], texts)
    return not killed


def differences(straight: Path, killed: Path) -> list[str]:
    """Return what in the killed run is not as in the other one; nothing if the project keeps its promise."""
    one, two, found = kit.Run(straight), kit.Run(killed), []
    if not kit.same(one.weights, two.weights):
        found.append(f"final weights differ by {kit.distance(one.weights, two.weights):.1e}")
    wanted, lines = (Counter((line["kind"], line["step"]) for line in each.lines) for each in (one, two))
    found += [f"{kind} line of step {step} is there twice" for (kind, step), count in lines.items() if count > 1]
    found += [f"{kind} line of step {step} is missing" for kind, step in wanted - lines]
    if not found and kit.timeless(straight) != kit.timeless(killed):
        found.append("some line of metrics.jsonl differs in more than its times")
    for name, other in (("the plan", None), ("the undisturbed run", straight)):
        if step := kit.first_other_step(killed, other):
            found.append(f"the examples of step {step} are not those of {name}")
    return found + [f"final: {error}" for error in verify_hashes.verify(killed / "final")]


def moment(rng: random.Random, last: int, kills_left: int, total: int) -> tuple[float, float]:
    """Return when to kill, (step, seconds after it): in the second in which a run starts, or somewhere in the steps after
    `last`, so that the kills are spread over the whole run."""
    if rng.random() < 0.2:
        return 0, rng.uniform(0, 1.0)
    return min(last + rng.uniform(0, 2 * (total - last) / kills_left), total - 1), rng.uniform(0, 0.05)


def storm(argv: list, folder: Path, world: int, kills: int, minutes: float = 60, seed: int | None = None) -> dict:
    """Return kills that hit a living job, seconds, and the differences between the killed runs and the undisturbed one.

    A killed run that was complete before its next kill is compared, and the storm continues in a new one.
    """
    rng, began, done, found = random.Random(seed), time.monotonic(), 0, []
    deadline = began + 60 * minutes
    straight = folder / "straight"
    run(argv, straight, world, deadline=deadline)
    total = kit.last_step(straight)
    while done < kills and time.monotonic() < deadline:
        killed, complete, before = folder / f"killed_{done}", False, done
        while not complete and done < kills and time.monotonic() < deadline:
            kill_at = moment(rng, kit.last_step(killed), kills - done, total)
            complete = run(argv, killed, world, kill_at, deadline)
            done += not complete
        if not complete:
            run(argv, killed, world, deadline=deadline)
        if done > before:
            found += differences(straight, killed)
        shutil.rmtree(killed)
    return {"kills": done, "seconds": time.monotonic() - began, "differences": found}
