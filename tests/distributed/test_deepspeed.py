"""DeepSpeed's ZeRO over gloo, through accelerate's own path: the numbers of one process, and checkpoints for any strategy."""

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM

import train
from src.distributed import deepspeed
from tests.helpers import kit

pytestmark = pytest.mark.cluster
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -r requirements-extra.txt")
STEPS = 20


def recipe(files, **fields) -> list[str]:
    values = {"model_config": files / "llama.yaml", "validation_file": files / "validation.jsonl"}
    values |= {"train_file": files / "train.jsonl", "global_batch_size": 32, "per_device_batch_size": 4}
    values |= {"max_steps": STEPS, "logging_steps": 1, "eval_steps": 10, "learning_rate": 3e-3, "warmup_steps": 5}
    return kit.flags(**values | {"save_steps": 5, "save_total_limit": 9} | fields)


def where(name: str, world: int, **keys) -> dict[str, str]:
    return kit.where(name, world, **{"mixed_precision": "no"} | keys)


@pytest.fixture(scope="module")
def one(files, tmp_path_factory):
    return kit.run_training(1, tmp_path_factory.mktemp("deepspeed") / "one", *recipe(files))


@pytest.fixture(scope="module")
def sharded(files, tmp_path_factory):
    """Runs under ZeRO-2 and ZeRO-3; on three ranks windows of eight micro-batches are uneven."""
    folder = tmp_path_factory.mktemp("zero")
    places = {"zero2": 2, "zero3": 3}
    return {name: kit.run_training(n, folder / name, *recipe(files), env=where(name, n)) for name, n in places.items()}


def as_one(run: kit.Run, one: kit.Run) -> None:
    assert [a == pytest.approx(b, rel=2e-5) for a, b in zip(run.losses(), one.losses(), strict=True)] == [True] * STEPS
    for mine, theirs in zip(run.kind("eval"), one.kind("eval"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert mine["examples"] == 103
    assert kit.ledger_text(run.folder) == kit.ledger_text(one.folder)
    assert kit.distance(run.weights, one.weights) <= 1e-5


@pytest.mark.parametrize("name, world", [("zero2", 2), ("zero3", 3)])
def test_zero_gives_the_numbers_of_one_process(sharded, one, name, world):
    as_one(sharded[name], one)
    said = json.loads((sharded[name].folder / "environment.json").read_text())
    assert (said["world_size"], said["strategy"]) == (world, f"DeepSpeed ZeRO-{name[-1]}")


def test_gradient_norms_are_those_of_one_process(sharded, one):
    """DeepSpeed clips for itself; what it says of the norm is that of the mean over the global batch."""
    for run in sharded.values():
        norms = [[line["grad_norm"] for line in lines.kind("train")] for lines in (run, one)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_mutant_that_divides_by_the_world_once_more_is_caught(files, one, tmp_path, monkeypatch):
    """A loss that is already the mean over all ranks, which DeepSpeed averages again."""
    original = train.compute_gradient

    def gradient(strategy, module, window, weight, *rest):
        return original(strategy, module, window, weight * strategy.accelerator.num_processes, *rest)

    monkeypatch.setattr(train, "compute_gradient", gradient)
    flags = recipe(files, max_grad_norm=0, optim="sgd", learning_rate=0.5, max_steps=6, eval_steps=6, save_steps=99)
    run = kit.run_training(2, tmp_path / "run", *flags, env=where("zero2", 2))
    monkeypatch.undo()
    straight = kit.run_training(1, tmp_path / "one", *flags)
    assert kit.distance(run.weights, straight.weights) > 1e-3


def test_a_checkpoint_goes_on_under_every_strategy(files, sharded, one, tmp_path):
    """ZeRO-3 on three ranks → ZeRO-2 on two → FSDP2 on two → ZeRO-3 on two → one process."""
    folder = tmp_path / "run"
    shutil.copytree(sharded["zero3"].folder, folder)
    chain = [(5, "zero2", 2), (10, "fsdp2", 2), (10, "zero3", 2), (15, None, 1)]
    for step, name, world in chain:
        for checkpoint in (folder / "checkpoints").iterdir():
            if int(checkpoint.name.removeprefix("step_")) > step:
                shutil.rmtree(checkpoint)
        shutil.rmtree(folder / "final")
        run = kit.run_training(world, folder, *recipe(files), env=where(name, world) if name else None)
        as_one(run, one)


def test_what_is_saved_is_a_folder_of_safetensors_that_transformers_reads(sharded, one):
    for run in sharded.values():
        names = {path.suffix for path in run.folder.rglob("*") if path.is_file()}
        assert names <= {".safetensors", ".json", ".jsonl", ".yaml", ".md", ".log", ".html"}
        model, found = AutoModelForCausalLM.from_pretrained(run.folder / "final", output_loading_info=True)
        assert not found["missing_keys"]
        assert kit.distance(model.state_dict(), one.weights) <= 1e-5


def _poisoned(argv):
    """Train with a loss that is not a number on rank 1, in step 3."""
    original = train.compute_gradient

    def gradient(strategy, module, window, *rest):
        task, loss = module.module.task, module.module.task.loss
        if strategy.accelerator.process_index == 1 and window[-1][0].step == 2:
            task.loss = lambda model, inputs: {"loss": loss(model, inputs)["loss"] * float("nan")}
        losses = original(strategy, module, window, *rest)
        task.loss = loss
        return losses

    train.compute_gradient = gradient
    train.main([str(word) for word in argv])


@pytest.mark.parametrize("name, precision", [("zero2", "bf16"), ("zero3", "no")])
def test_an_update_that_is_not_finite_is_left_out_on_all_ranks(files, one, tmp_path, name, precision):
    argv = [*recipe(files, max_steps=6, save_steps=99), "--output_dir", tmp_path / "run"]
    kit.spawn(2, _poisoned, argv, out=tmp_path / "out", env=where(name, 2, mixed_precision=precision))
    run = kit.Run(tmp_path / "run")
    assert [line["skipped"] for line in run.kind("train")] == [0, 0, 1, 1, 1, 1]
    assert run.losses()[2] is None
    assert run.losses()[0] == pytest.approx(one.losses()[0], rel=1e-3)  # bf16 computes, float32 is kept
    assert {str(value.dtype) for value in run.weights.values()} == {"torch.float32"}
    assert json.loads((run.folder / "final" / "config.json").read_text())["dtype"] == "float32"


def test_evaluation_alone_is_the_number_of_the_run(files, sharded, tmp_path):
    argv = ["--checkpoint", sharded["zero3"].folder]
    line = kit.run_evaluation(2, tmp_path / "two", *argv, env=where("zero3", 2))
    assert line["examples"] == 103
    assert line["loss"] == pytest.approx(sharded["zero3"].kind("eval")[-1]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    "fields, words",
    [({"dtype": "float64"}, "dtype is float64"), ({"per_device_batch_size": "auto"}, "per_device_batch_size is auto")],
)
def test_what_deepspeed_does_not_have_is_refused(files, tmp_path, fields, words):
    (tmp_path / "here").mkdir()
    argv = [*recipe(files, **fields), "--output_dir", "run"]
    codes, outputs = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=2, env=where("zero2", 2))
    assert codes == [2, 2]
    assert words in outputs[0]
    assert not (tmp_path / "here" / "run").exists()


def test_its_own_clipping_is_said_to_be_ignored_and_its_optimizer_refused(capsys):
    class Accelerator:  # what the configuration reads
        mixed_precision = "no"

    from types import SimpleNamespace

    from src.config.errors import UsageError
    from src.config.schema import RunConfig

    plugin = SimpleNamespace(zero_stage=2, deepspeed_config={"gradient_clipping": 5.0})
    Accelerator.state = SimpleNamespace(deepspeed_plugin=plugin)
    deepspeed._configure(Accelerator, RunConfig(max_grad_norm=0.5))
    assert plugin.deepspeed_config["gradient_clipping"] == 0.5
    assert "gradient_clipping 5.0 of the DeepSpeed configuration is ignored" in capsys.readouterr().err
    plugin.deepspeed_config["optimizer"] = {}
    with pytest.raises(UsageError, match="has a field optimizer"):
        deepspeed._configure(Accelerator, RunConfig())
