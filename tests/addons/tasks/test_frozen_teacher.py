"""A frozen teacher under FSDP2: sharded like the student, not trained, not saved, and there again after resuming."""

import pytest
import torch

import train
from tests.addons.tasks import recipes
from tests.helpers import kit
from tests.helpers.backend_runs import at_step, where

pytestmark = pytest.mark.cluster


def _train(argv):
    """Train on this rank; return (kinds of the teacher's weights, its sharded layers, weights unchanged) after a run."""
    seen = {}

    def look(backend, module, optimizer):
        seen["module"] = module
        seen["before"] = [p.to_local().clone() for p in module.model.teacher.parameters()]

    kit.after_prepare(look)
    train.main([str(word) for word in argv])
    teacher = seen["module"].model.teacher
    parameters = list(teacher.parameters())
    units = sum(isinstance(part, torch.distributed.fsdp.FSDPModule) for part in teacher.modules())
    same = all(torch.equal(p.to_local(), b) for p, b in zip(parameters, seen["before"], strict=True))
    return {type(p.data).__name__ for p in parameters}, units, same


def test_teacher_is_sharded_and_resumed(tmp_path):
    """Student and teacher have layers of different classes."""
    flags = recipes.distillation(tmp_path) + kit.flags(
        train_file=tmp_path / "train.jsonl",
        validation_file=tmp_path / "validation.jsonl",
        dtype="float64",
        model_config=kit.write_yaml(tmp_path / "llama.yaml", kit.LLAMA),
        global_batch_size=24,
        per_device_batch_size=6,
        max_steps=6,
        save_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
    )
    alone = kit.run_training(1, tmp_path / "alone", *flags)
    env, folder = where("fsdp2", 2), tmp_path / "two"
    argv = [*flags, "--output_dir", folder]
    found = kit.spawn(2, _train, argv, out=tmp_path / "out", env=env)
    assert found == [({"DTensor"}, kit.GPT2["n_layer"], True)] * 2
    whole = kit.Run(folder)
    assert kit.distance(alone.weights, whole.weights) <= 1e-6  # Llama's norms compute in float32
    assert alone.kind("eval")[-1]["kl"] == pytest.approx(whole.kind("eval")[-1]["kl"], rel=1e-6)
    assert not any("teacher" in name for name in kit.load_weights(at_step(whole, 6), "optimizer"))

    run = kit.run_training(2, kit.rewind(folder, 3, tmp_path / "resumed"), *flags, env=env)
    assert kit.same(run.weights, whole.weights)
