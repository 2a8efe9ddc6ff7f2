"""`make find-batch-size`: one rank runs out of memory, and all use the size that fits it."""

import numpy as np
import pytest
import torch

from addons.tools import find_batch_size
from engine.config.run_config import RunConfig
from engine.distributed.choose_backend import make_backend
from engine.run.model_with_loss import ModelWithLoss
from src.tasks import causal_lm
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
    size = find_batch_size.largest_that_fits(backend, module, task, splits["train"], 16)
    return size, tried, all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("limits", [[100, 4], [6, 100]])
def test_all_ranks_use_what_fits_the_smallest(files, tmp_path, limits):
    for result in kit.spawn(2, _search, files, limits, out=tmp_path):
        assert result == (4, [16, 8, 4], True)  # every rank tried every size: no collective was left waiting


def test_other_errors_of_a_forward_pass_are_raised(files, tmp_path):
    """The mutant would take every error for a lack of memory, and train with one row."""
    with pytest.raises(kit.RankFailed, match="shapes cannot be multiplied"):
        kit.spawn(1, _search, files, [0], out=tmp_path)


@pytest.mark.parametrize("share, first", [(1, 1), (2, 2), (3, 2), (31, 16), (32, 32)])
def test_first_size_is_a_power_of_two(share, first):
    assert find_batch_size.largest_power_of_two(share) == first


def test_cpu_gets_one_sentence_and_no_number(files, tmp_path):
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl"}
    codes, texts = kit.run_command("addons/tools/find_batch_size.py", *kit.flags(**fields), folder=tmp_path / "here")
    assert codes == [2]
    assert "on a CPU is killed" in texts[0]
    assert "per_device_batch_size: " not in texts[0]


def _prints(argv: list[str], limit: int) -> None:
    """Run the command as on a device where `limit` rows fit."""
    find_batch_size.check_searchable = lambda *ignored: None
    find_batch_size.lacks_memory = lambda backend, module, task, train_set, size: size > limit
    find_batch_size.main([str(word) for word in argv])


@pytest.mark.parametrize("world, limit, size", [(1, 9, 8), (2, 100, 16)])
def test_command_prints_the_line_of_the_run_file(files, tmp_path, world, limit, size):
    """At most a process's share of the global batch: 32 rows on one process, 16 on each of two."""
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl"}
    argv = kit.flags(**fields, global_batch_size=32, output_dir=tmp_path / "run")
    kit.spawn(world, _prints, argv, limit, out=tmp_path / "out")
    texts = [(tmp_path / "out" / f"rank{rank}.txt").read_text() for rank in range(world)]
    assert f"\nper_device_batch_size: {size}\n" in texts[0]
    assert "".join(texts).count("per_device_batch_size: ") == 1
    assert not (tmp_path / "run").exists()
