"""Runs read back from their folders, and comparisons of weights and lines."""

import json
import shutil
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from engine.plan.batch_plan import PlanConfig, hash_ids, plan
from engine.run.ledger import hash_text


def last_step(folder) -> int:
    """Return the step of the last metrics line of a run, also while it trains."""
    file = Path(folder) / "metrics.jsonl"
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


class Run:
    """A finished run, read back from its folder."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        self.weights = load_weights(self.folder / "final")

    def kind(self, kind: str) -> list[dict]:
        return [line for line in self.lines if line["kind"] == kind]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.kind("train")]


def load_weights(folder, part: str = "model") -> dict[str, torch.Tensor]:
    """Return the tensors of a part of a checkpoint or final model, from one file or several shards."""
    paths = [*Path(folder).glob(f"{part}.safetensors"), *Path(folder).glob(f"{part}-*-of-*.safetensors")]
    found = [item for path in paths for item in load_file(path).items()]
    assert len(found) == len(dict(found)) > 0
    return dict(found)


def rewind(folder, step: int, copy=None) -> Path:
    """Remove final/ and the checkpoints after `step` of a run, or of a copy of it; return the folder."""
    folder = Path(shutil.copytree(folder, copy) if copy else folder)
    late = [path for path in (folder / "checkpoints").iterdir() if int(path.name.removeprefix("step_")) > step]
    for path in (folder / "final", *late):
        shutil.rmtree(path)
    return folder


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two sets of weights, relative to the largest weight of each tensor.

    Tensors that are zero except for rounding are measured against 0.001."""
    assert one.keys() == other.keys()
    assert one
    return max(((one[k] - other[k]).abs().max() / one[k].abs().max().clamp(min=1e-3)).item() for k in one)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two sets of weights are equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def timeless(folder) -> list[dict]:
    """Return the lines of metrics.jsonl without times, rates and the use of a GPU."""
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    gpu = ("tflops", "mfu", "gpu_memory_gib")
    return [{name: value for name, value in line.items() if "second" not in name and name not in gpu} for line in lines]


def ledger_text(folder) -> str:
    """Return the text of ledger.jsonl."""
    return (Path(folder) / "ledger.jsonl").read_text()


def first_other_step(folder, other=None) -> int | None:
    """Return the first step that trained on other examples than the run `other`, or than the batch plan says.

    None: there is no such step. A step that is missing or there twice counts."""
    first, *steps = map(json.loads, ledger_text(folder).splitlines())
    if other:
        _, *expected = map(json.loads, ledger_text(other).splitlines())
    else:
        examples, batch, seed = (first["plan"][name] for name in ("examples", "global_batch_size", "seed"))
        config = PlanConfig(examples, batch, batch, seed, quotas=first["plan"].get("quotas"))
        expected = [_planned_line(config, step) for step in range(1, len(steps) + 1)]
    pairs = enumerate(zip_longest(steps, expected), start=1)
    return next((step for step, (line, wanted) in pairs if line != wanted), None)


def _planned_line(config: PlanConfig, step: int) -> dict:
    """Return the line of ledger.jsonl of a step according to the batch plan."""
    ids = np.concatenate([micro_batch.ids for micro_batch in plan(config, *config.sizes.locate(step - 1))])
    return {"step": step, "examples": len(ids), "ids": hash_text(*hash_ids(ids))}
