"""The average of weights in final/: what eval.py finds there, which step it is of, what says so."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from addons.techniques import _chain
from addons.techniques._chain import TechniqueChain
from engine.config.errors import UsageError
from engine.config.find_addons import run_config
from engine.process import run_status
from tests.addons.tasks import recipes
from tests.engine.checkpointing import recipe
from tests.helpers import kit

EMA = {"ema": {"decay": 0.9, "final": True}}
BEST = {"metric_for_best_model": "ema/loss", "greater_is_better": True}  # so that the first evaluation is the best


def at_step(number: int) -> Path:
    """Return the checkpoint of a step, relative to the run folder."""
    return Path("checkpoints", f"step_{number:08d}")


def flags(tiny, techniques=EMA, **fields) -> list[str]:
    values = {"max_steps": 6, "eval_steps": 3, "save_steps": 100, "per_device_eval_batch_size": 4}
    return recipe.flags(tiny, **values | {"techniques": json.dumps(techniques)} | fields)


def averaged(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the EMA of a checkpoint, with the names of the saved model."""
    part = kit.load_weights(folder / at_step(step), "ema")
    return {name.removeprefix("average/model."): value for name, value in part.items() if "/" in name}


def check_final(run: kit.Run, step: int, env=None, worlds=(1, 2, 3)) -> None:
    """Assert that final/ holds the EMA of `step`, and that eval.py finds there what the run has reported for it."""
    expected = averaged(run.folder, step)
    assert kit.same({name: run.weights[name] for name in expected}, expected)
    raw = kit.load_weights(run.folder / at_step(step))
    assert kit.distance({name: raw[name] for name in expected}, expected) > 1e-3
    line = next(line for line in run.kind("eval") if line["step"] == step)
    for world in worlds:
        folder = run.folder.with_name(f"{run.folder.name}_eval{world}")
        found = kit.run_evaluation(world, folder, "--checkpoint", run.folder, env=env)
        assert (found["step"], found["loss"]) == (step, line["ema/loss"])
        assert found["perplexity"] == line["ema/perplexity"]
    assert line["ema/loss"] != line["loss"]
    assert "ema/weight" not in line
    assert run_status.read_status(run.folder)["final_step"] == step
    text = (run.folder.with_suffix(".out") / "rank0.txt").read_text()
    for said in (text, (run.folder / "final" / "README.md").read_text()):
        assert "average (ema)" in said
        assert str(step) in said


@pytest.fixture(scope="module")
def last(tiny, tmp_path_factory) -> kit.Run:
    return kit.run_training(2, tmp_path_factory.mktemp("last") / "run", *flags(tiny))


def test_final_holds_the_average_of_the_last_step(last):
    check_final(last, 6)
    assert ", ema/loss " in (last.folder.with_suffix(".out") / "rank0.txt").read_text()


@pytest.mark.cluster
@pytest.mark.parametrize("reshard", [True, False])
def test_shards_are_averaged_evaluated_and_written(tiny, tmp_path, reshard):
    """Without resharding FSDP2 keeps the weights of the evaluation before; accelerate does not reshard the last layers."""
    env = kit.where("fsdp2", 2, mixed_precision="no", fsdp_reshard_after_forward=reshard)
    fields = BEST if reshard else {}
    run = kit.run_training(2, tmp_path / "run", *flags(tiny, **fields), env=env, units=1)
    check_final(run, 3 if reshard else 6, env=env, worlds=(2,))


def test_mutant_that_keeps_gathered_weights_is_caught(tiny, tmp_path, monkeypatch):
    env = kit.where("fsdp2", 2, mixed_precision="no")
    monkeypatch.setattr(_chain, "reshard", lambda model: None)
    with pytest.raises((AssertionError, KeyError)):
        check_final(kit.run_training(2, tmp_path / "run", *flags(tiny), env=env, units=1), 6, env, (2,))


@pytest.mark.parametrize("damaged", [False, True])
def test_final_holds_the_average_of_the_best_step(tiny, tmp_path, damaged):
    run = kit.run_training(2, tmp_path / "run", *flags(tiny, **BEST))
    check_final(run, 3, worlds=(1,))
    if damaged:
        shutil.rmtree(run.folder / "final")
        recipe.DAMAGE["middle bit flipped"](run.folder / at_step(3) / "ema.safetensors")
        check_final(kit.run_training(1, run.folder, *flags(tiny, **BEST)), 6, worlds=(1,))


def test_saved_part_of_a_model_with_a_frozen_teacher(tmp_path):
    kit.need_task(name := "distillation")
    values = {"train_file": tmp_path / "train.jsonl", "validation_file": tmp_path / "validation.jsonl", "max_steps": 3}
    values |= {"global_batch_size": 8, "per_device_batch_size": 4, "dtype": "bfloat16", "techniques": json.dumps(EMA)}
    values |= {"learning_rate": 1e-2}
    run = kit.run_training(1, tmp_path / "run", *getattr(recipes, name)(tmp_path), *kit.flags(**values))
    expected = {n.removeprefix("student."): value for n, value in averaged(run.folder, 3).items()}
    assert {value.dtype for value in expected.values()} == {torch.float32}  # of weights in bfloat16
    assert not [name for name in expected if name.startswith("teacher")]
    assert kit.same({name: run.weights[name] for name in expected}, {n: v.bfloat16() for n, v in expected.items()})
    found = kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", run.folder)
    assert found["loss"] == run.kind("eval")[-1]["ema/loss"]


def test_a_new_run_starts_from_final_or_from_the_weights_of_training(tiny, last, tmp_path):
    for name, source in (("final", last.folder), ("raw", last.folder / at_step(6))):
        run = kit.run_training(1, tmp_path / name, *recipe.flags(tiny, max_steps=1, learning_rate=0, init_from=source))
        weights = last.weights if name == "final" else kit.load_weights(source)
        assert kit.same(run.weights, weights)


def test_final_can_hold_one_average():
    cfg = run_config(techniques=EMA | {"swa": {"final": True}}, mixture={"ema": {}, "b": {}})
    with pytest.raises(UsageError) as refused:
        TechniqueChain(cfg)
    assert "ema and swa have final: true" in str(refused.value)
    assert "mixture: ema is also the name of a technique" in str(refused.value)
