"""`per_device_batch_size: auto`: one rank runs out of memory, and all use the size that fits it."""

from types import SimpleNamespace

import pytest
import torch
import yaml

from src.config.schema import RunConfig
from src.distributed.backends import make_backend
from src.training import memory
from src.training.model_with_loss import ModelWithLoss
from tests.helpers import kit

CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


def flags(files, **values):
    common = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl"}
    return kit.flags(**common, max_steps=4, logging_steps=1, **values)


def _search(files, limits: list[int]):
    """Search on this rank with a model that runs out of memory above this rank's limit; return (sizes, sizes of forward passes, clean)."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    backend = make_backend(accelerator, RunConfig())
    task, splits = kit.open_data(model_config=files / "llama.yaml", train_file=files / "train.jsonl")
    model_with_loss = ModelWithLoss(task.build(), task)
    limit, tried, forward = limits[accelerator.process_index], [], model_with_loss.forward

    def bounded(inputs):
        tried.append(len(inputs["input_ids"]))
        if tried[-1] > limit:
            raise (torch.OutOfMemoryError("CUDA out of memory") if limit > 4 else RuntimeError(CUBLAS))
        return forward(inputs)

    model_with_loss.forward = bounded
    module = accelerator.prepare(model_with_loss)

    sizes, lacks = [16], memory.lacks_memory
    while sizes[-1] > 1 and backend.hosts.sum([lacks(backend, module, task, splits["train"], sizes[-1])])[0]:
        sizes.append(sizes[-1] // 2)
    return sizes, tried, all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("limits, sizes", [([100, 4], [16, 8, 4]), ([6, 100], [16, 8, 4])])
def test_all_ranks_use_what_fits_the_smallest(files, tmp_path, limits, sizes):
    for result in kit.spawn(2, _search, files, limits, out=tmp_path):
        assert result == (sizes, sizes, True)  # every rank tried every size, so no collective was left waiting


def test_auto_is_kept_on_resume(files, tmp_path):
    auto = kit.run_training(1, tmp_path / "auto", *flags(files, per_device_batch_size="auto"))
    chosen = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())["per_device_batch_size"]
    assert chosen == memory.LARGEST_ON_CPU
    fixed = kit.run_training(1, tmp_path / "fixed", *flags(files, per_device_batch_size=chosen))
    assert kit.same(auto.weights, fixed.weights)
    kit.run_training(2, tmp_path / "auto", *flags(files, per_device_batch_size="auto"))
    assert "nothing is left to train" in (tmp_path / "auto.out" / "rank0.txt").read_text()


def test_other_errors_of_a_forward_pass_are_raised(files):
    """The mutant would take every error for a lack of memory, and train with one row."""
    task, splits = kit.open_data(model_config=files / "llama.yaml", train_file=files / "train.jsonl")
    module = ModelWithLoss(task.build(), task)
    module.forward = lambda inputs: torch.zeros(2) @ torch.zeros(3)
    backend = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), unwrap_model=lambda module: module)
    )
    with pytest.raises(RuntimeError, match="size"):
        memory.lacks_memory(backend, module, task, splits["train"], 2)
