"""The bytes that a run has: tensors alive before an update, files of checkpoints and of final/; what its plan says."""

import gc
import re

import torch

from tests.helpers import kit

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _storages() -> dict[int, int]:
    """Return {address: bytes} of the memory of all tensors alive."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and not each.is_meta]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]  # no objects of Python yet
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def _train(argv: list) -> int:
    """Train; return the bytes of tensors alive before the second update, which comes before the copy of the first save."""
    import train

    before = _storages()
    sizes, optimizer_step = [], train.optimizer_step

    def measured_step(*arguments):
        sizes.append(sum(size for address, size in _storages().items() if address not in before))
        return optimizer_step(*arguments)

    train.optimizer_step = measured_step
    train.main([str(word) for word in argv])
    return sizes[1]


def measure(folder, flags: list[str]) -> dict[str, tuple[float, float]]:
    """Train on one process in `folder`/run; return {"memory", "disk": (bytes that the plan says, bytes that the run has)}."""
    [memory] = kit.spawn(1, _train, [*flags, "--output_dir", folder / "run"], out=folder / "out")
    text = (folder / "out" / "rank0.txt").read_text()
    files = [path for part in ("checkpoints", "final") for path in (folder / "run" / part).rglob("*") if path.is_file()]
    had = {"memory": memory, "disk": sum(path.stat().st_size for path in files)}
    return {name: (_planned(text, name), size) for name, size in had.items()}


def _planned(text: str, name: str) -> float:
    number, unit = re.search(rf"^  {name}  +([\d.e+]+) (\w+)", text, re.M).groups()
    return float(number) * UNITS[unit]
