"""`per_device_batch_size: auto`: one rank runs out of memory, and all use the size that fits it."""

import numpy as np
import pytest
import torch
import yaml

from src.config.schema import RunConfig
from src.distributed.backends import make_backend
from src.tasks import causal_lm
from src.training import memory
from src.training.model_with_loss import ModelWithLoss
from tests.helpers import kit

ERRORS = {  # of a forward pass, by the most rows that fit
    6: torch.OutOfMemoryError("CUDA out of memory"),
    4: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    0: RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
}


def _search(files, limits: list[int]):
    """Search with a model that fails above this rank's limit; return (size, sizes of forward passes, clean)."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    backend = make_backend(accelerator, RunConfig())
    task, splits = kit.open_data(model_config=files / "llama.yaml", train_file=files / "train.jsonl")
    causal_lm.positions_of_targets = lambda targets: {"target_positions": np.flatnonzero(targets)}  # as of prompts
    model_with_loss = ModelWithLoss(task.build(), task)
    limit, tried, forward = limits[accelerator.process_index], [], model_with_loss.forward

    def bounded(inputs):
        assert "target_positions" not in inputs  # room for logits at all positions, whichever rows are tried
        tried.append(len(inputs["input_ids"]))
        if tried[-1] > limit:
            raise ERRORS[limit]
        return forward(inputs)

    model_with_loss.forward = bounded
    module, _ = backend.prepare(model_with_loss, torch.optim.SGD(model_with_loss.parameters(), 0.1))
    size = memory.largest_that_fits(backend, module, task, splits["train"], 16)
    return size, tried, all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("limits", [[100, 4], [6, 100]])
def test_all_ranks_use_what_fits_the_smallest(files, tmp_path, limits):
    for result in kit.spawn(2, _search, files, limits, out=tmp_path):
        assert result == (4, [16, 8, 4], True)  # every rank tried every size: no collective was left waiting


def test_other_errors_of_a_forward_pass_are_raised(files, tmp_path):
    """The mutant would take every error for a lack of memory, and train with one row."""
    with pytest.raises(kit.RankFailed, match="shapes cannot be multiplied"):
        kit.spawn(1, _search, files, [0], out=tmp_path)


def test_auto_is_kept_on_resume(files, tmp_path):
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_steps": 4}
    flags = kit.flags(**fields, per_device_batch_size="auto")
    run = kit.run_training(1, tmp_path / "auto", *flags)
    chosen = yaml.safe_load((run.folder / "config.yaml").read_text())["per_device_batch_size"]
    assert chosen == memory.LARGEST_ON_CPU
    kit.run_training(2, run.folder, *flags)
    assert "nothing is left to train" in (tmp_path / "auto.out" / "rank0.txt").read_text()
