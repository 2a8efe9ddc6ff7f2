"""Kill a run that trains in a store at random moments, remove its folder from the machine, and start it again."""

import random
import time
from pathlib import Path

from tests.addons.stores import server
from tests.helpers import kit
from tests.helpers.kill_storm import differences


def storm(flags: list, cache: Path, folder: Path, address: str, kills: int, seed: int | None = None) -> dict:
    """Return the number of kills of a living run, of those before its first step, and what is wrong afterwards.

    A run that ends before its kill is compared, and the storm continues in a new one."""
    rng = random.Random(seed)
    kit.run_training(1, folder / "straight", *flags)
    wrong, done, early, number, seconds = [], 0, 0, 0, 4.0
    while True:
        run = f"{address}/run_{number}"
        newest = server.newest_whole(run)
        began = time.monotonic()
        ranks = kit.Ranks("train.py", *flags, "--output_dir", run, folder=folder / "here")
        end = began + rng.uniform(0, seconds) if done < kills else float("inf")
        while time.monotonic() < end and ranks.processes[0].is_alive():
            time.sleep(0.005)
        is_killed = ranks.processes[0].is_alive()
        if is_killed:
            ranks.processes[0].kill()
        codes, text = ranks.wait(), ranks.text()
        done += is_killed
        step = server.resumed_from(text)
        early += step is None
        if step is not None and step < newest:
            wrong.append(f"kill {done}: began at step {step}, but the store had step {newest}")
        server.forget(cache)
        if is_killed:
            continue
        if codes != [0]:
            return {"kills": done, "early": early, "wrong": [*wrong, text]}
        seconds = max(1.0, 0.6 * (time.monotonic() - began))
        wrong += differences(folder / "straight", server.download(run, folder / "downloaded"))
        number += 1
        if done >= kills:
            return {"kills": done, "early": early, "runs": number, "wrong": wrong}
