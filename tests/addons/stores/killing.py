"""Kill a run that trains in a store at random moments, remove its folder from the machine, and start it again."""

import random
import shutil
import time
from pathlib import Path

from tests.addons.stores import server
from tests.helpers import kit
from tests.helpers.kill_storm import differences


def storm(flags: list, cache: Path, folder: Path, address: str, kills: int, seed: int | None = None) -> dict:
    """Return the number of kills of a living run, of those before its first step, and what is wrong afterwards.

    The first run of all is not disturbed: it shows how long one trains. A run that ends before its kill is compared, and
    the storm continues in a new one."""
    rng = random.Random(seed)
    kit.run_training(1, folder / "straight", *flags)
    wrong, done, early, number, seconds = [], 0, 0, 0, 0.0
    while True:
        run = f"{address}/run_{number}"
        newest = server.newest_whole(run)
        shutil.rmtree(folder / "here.out", ignore_errors=True)  # what the last start printed
        ranks = kit.Ranks("train.py", *flags, "--output_dir", run, folder=folder / "here")
        is_start = rng.random() < 0.2  # in the second in which it starts; else while it trains and uploads
        began = time.monotonic() if is_start else None
        wait = float("inf") if not seconds or done >= kills else rng.uniform(0, 1 if is_start else seconds / 4)
        while ranks.processes[0].is_alive() and (began is None or time.monotonic() - began < wait):
            if began is None and "first step after" in ranks.text():
                began = time.monotonic()
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
        seconds = seconds or time.monotonic() - (began or 0)
        wrong += differences(folder / "straight", server.download(run, folder / "downloaded"))
        number += 1
        if done >= kills:
            return {"kills": done, "early": early, "runs": number, "wrong": wrong}
