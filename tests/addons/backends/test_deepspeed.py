"""DeepSpeed's ZeRO over gloo, by accelerate's own code: the numbers of one process, and checkpoints for any backend."""

import json
import shutil
from functools import partialmethod
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

import train
from addons.backends import deepspeed
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.run.totals_and_votes import StepTotals
from tests.engine.distributed import test_unused_parameters as unused
from tests.helpers import classifier_task, kit, plain_task, routed_model
from tests.helpers.backend_runs import check_same_run, recipe, where

pytestmark = pytest.mark.cluster
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -r requirements-extra.txt")
STEPS = 20
FIELDS = {"max_steps": STEPS, "eval_steps": 10, "warmup_steps": 5, "save_steps": 5}


@pytest.fixture(scope="module")
def one(files, tmp_path_factory):
    return kit.run_training(1, tmp_path_factory.mktemp("deepspeed") / "one", *recipe(files, **FIELDS))


@pytest.fixture(scope="module")
def sharded(files, tmp_path_factory):
    """Runs under ZeRO-2 and ZeRO-3; on three ranks batches of eight micro-batches are uneven."""
    folder, flags = tmp_path_factory.mktemp("zero"), recipe(files, **FIELDS)
    runs = {}
    for name, world in {"zero2": 2, "zero3": 3}.items():
        runs[name] = kit.run_training(world, folder / name, *flags, env=where(name, world))
    return runs


@pytest.mark.parametrize("name, world", [("zero2", 2), ("zero3", 3)])
def test_zero_trains_the_numbers_of_one_process(sharded, one, name, world):
    run = sharded[name]
    check_same_run(one, run, rel=2e-5)
    known = json.loads((run.folder / "environment.json").read_text())
    assert (known["world_size"], known["strategy"]) == (world, f"DeepSpeed ZeRO-{name[-1]}")
    suffixes = {path.suffix for path in run.folder.rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jsonl", ".yaml", ".md", ".log", ".diff", ".lock"}  # no pickle
    model, found = AutoModelForCausalLM.from_pretrained(run.folder / "final", output_loading_info=True)
    assert not found["missing_keys"]
    assert kit.distance(model.state_dict(), one.weights) <= 1e-5


def test_mutant_that_divides_by_the_world_size_twice_is_caught(files, tmp_path, monkeypatch):
    """A loss that is already the mean over all ranks, which DeepSpeed averages again."""
    fields = {"max_grad_norm": 0, "optim": "sgd", "learning_rate": 0.5, "max_steps": 6, "eval_steps": 6}
    flags = recipe(files, **fields)
    one = kit.run_training(1, tmp_path / "one", *flags)
    original = train.compute_gradient

    def gradient(backend, module, batch, totals):
        weight = totals.weight * backend.accelerator.num_processes
        return original(backend, module, batch, StepTotals(totals, weight=weight))

    monkeypatch.setattr(train, "compute_gradient", gradient)
    run = kit.run_training(2, tmp_path / "run", *flags, env=where("zero2", 2))
    assert kit.distance(run.weights, one.weights) > 1e-3


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_factors_of_parameter_groups_reach_the_engine(files, tmp_path, name):
    fields = {"max_grad_norm": 0, "optim": "sgd", "learning_rate": 0.5, "max_steps": 4, "eval_steps": 4}
    factors = {"parameter_groups": json.dumps({"*norm*": {"lr_factor": 4.0}, "*mlp*": {"lr_factor": 0.25}})}
    one, without = (
        kit.run_training(1, tmp_path / f"{len(more)}", *recipe(files, **fields | more)) for more in (factors, {})
    )
    run = kit.run_training(2, tmp_path / name, *recipe(files, **fields | factors), env=where(name, 2))
    assert kit.distance(run.weights, one.weights) <= 1e-5
    assert kit.distance(run.weights, without.weights) > 1e-3


def test_a_checkpoint_resumes_under_every_backend(files, sharded, one, tmp_path):
    """ZeRO-3 on three ranks, ZeRO-1 on two, FSDP2 on two, ZeRO-3 on two, one process."""
    folder = shutil.copytree(sharded["zero3"].folder, tmp_path / "run")
    for step, name, world in [(5, "zero2", 2), (10, "fsdp2", 2), (10, "zero3", 2), (15, None, 1)]:
        kit.rewind(folder, step)
        env = where(name, world, **{"zero_stage": 1} if name == "zero2" else {}) if name else None
        check_same_run(one, kit.run_training(world, folder, *recipe(files, **FIELDS), env=env), rel=2e-5)


def _poisoned(argv):
    """Train with a NaN loss on rank 1, in step 3."""
    original = train.compute_gradient

    def gradient(backend, module, batch, totals):
        task, loss = module.module.task, module.module.task.loss
        if backend.accelerator.process_index == 1 and batch[-1][0].step == 2:
            task.loss = lambda model, inputs: {"loss": loss(model, inputs)["loss"] * float("nan")}
        losses = original(backend, module, batch, totals)
        task.loss = loss
        return losses

    train.compute_gradient = gradient
    train.main([str(word) for word in argv])


@pytest.mark.parametrize("name, precision", [("zero2", "bf16"), ("zero3", "no")])
def test_an_update_that_is_not_finite_is_skipped_on_all_ranks(files, one, tmp_path, name, precision):
    argv = [*recipe(files, **FIELDS | {"max_steps": 6, "save_steps": 99}), "--output_dir", tmp_path / "run"]
    kit.spawn(2, _poisoned, argv, out=tmp_path / "out", env=where(name, 2, mixed_precision=precision))
    run = kit.Run(tmp_path / "run")
    assert [line["skipped"] for line in run.kind("train")] == [0, 0, 1, 1, 1, 1]
    assert run.losses()[2] is None
    assert run.losses()[0] == pytest.approx(one.losses()[0], rel=1e-3)  # computed in bf16, kept in float32
    assert {str(value.dtype) for value in run.weights.values()} == {"torch.float32"}
    assert json.loads((run.folder / "final" / "config.json").read_text())["dtype"] == "float32"


CLIPPED = {"max_grad_norm": 0.05, "optim": "sgd", "learning_rate": 5.0, "warmup_steps": 4, "max_steps": 6}
CLIPPED |= {"per_device_batch_size": 2, "save_steps": 99, "eval_steps": 6}


def test_clip_rate_and_skip_under_zero2(files, tmp_path):
    """Every gradient is clipped, the rate grows, and step 3 is skipped, as under DDP."""
    argv, runs = recipe(files, **FIELDS | CLIPPED), {}
    for name, env in {"ddp": None, "zero2": where("zero2", 2)}.items():
        kit.spawn(2, _poisoned, [*argv, "--output_dir", tmp_path / name], out=tmp_path / f"{name}.out", env=env)
        runs[name] = kit.Run(tmp_path / name)
    ddp, zero2 = runs["ddp"], runs["zero2"]
    assert [line["skipped"] for line in ddp.kind("train")] == [0, 0, 1, 1, 1, 1]
    assert all(line["grad_norm"] > 0.05 for line in ddp.kind("train") if line["step"] != 3)
    for one, other in zip(ddp.kind("train"), zero2.kind("train"), strict=True):
        for key in ("learning_rate", "skipped", "grad_norm"):
            assert other[key] == (None if one[key] is None else pytest.approx(one[key], rel=1e-4))
    assert kit.distance(zero2.weights, ddp.weights) <= 1e-5


def test_mutant_backward_of_accelerate_is_caught(files, tmp_path, monkeypatch):
    """It updates after each micro-batch, so the step finds no gradient."""
    monkeypatch.setattr(deepspeed, "AcceleratorOfEngine", lambda accelerator, backward: accelerator)
    argv = [*recipe(files, **FIELDS | CLIPPED), "--output_dir", tmp_path / "run"]
    with pytest.raises(kit.RankFailed, match="clip_grad_norm"):
        kit.spawn(2, _poisoned, argv, out=tmp_path / "out", env=where("zero2", 2))


def test_evaluation_alone_is_the_number_of_the_run(sharded, tmp_path):
    line = kit.run_evaluation(2, tmp_path / "two", "--checkpoint", sharded["zero3"].folder, env=where("zero3", 2))
    assert line["examples"] == 103
    assert line["loss"] == pytest.approx(sharded["zero3"].kind("eval")[-1]["loss"], rel=1e-6)


def test_what_deepspeed_cannot_do_is_refused(files, tmp_path):
    argv = [*recipe(files, **FIELDS, dtype="float64"), "--output_dir", "run"]
    codes, outputs = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=2, env=where("zero2", 2))
    assert codes == [2, 2]
    assert "dtype is float64" in outputs[0]
    assert not (tmp_path / "here" / "run").exists()


def test_fields_of_a_json_that_the_run_file_sets(capsys):
    """DeepSpeed would refuse its batch sizes, and accelerate its optimizer, both with tracebacks."""
    given = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    given |= {"gradient_clipping": 0.1}
    plugin = SimpleNamespace(deepspeed_config=dict(given), zero_stage=2)
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin), num_processes=2, mixed_precision="no")
    deepspeed._configure(accelerator, RunConfig(global_batch_size=8))
    assert plugin.deepspeed_config == dict.fromkeys(given, 1) | {"train_batch_size": 2}
    warnings = capsys.readouterr().err
    assert all(f"{name} {value} in the DeepSpeed" in warnings for name, value in given.items())
    plugin.deepspeed_config["optimizer"] = {"type": "AdamW"}
    with pytest.raises(UsageError, match="a field optimizer, which the run file sets"):
        deepspeed._configure(accelerator, RunConfig())


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_zero_trains_and_resumes_a_plain_module(plain, tmp_path, name):
    argv = plain_task.flags(plain, dtype="float32", teacher=name == "zero3")
    one = kit.run_training(1, tmp_path / "one", *argv)
    two = kit.run_training(2, tmp_path / "two", *argv, env=where(name, 2), timeout=500)
    assert kit.distance(one.weights, two.weights) <= 1e-4
    folder = kit.rewind(two.folder, 16, tmp_path / "resumed")
    run = kit.run_training(2, folder, *argv, env=where(name, 2), timeout=500)
    assert kit.distance(run.weights, two.weights) <= 1e-6
    line = kit.run_evaluation(1, tmp_path / "alone", "--checkpoint", two.folder)
    assert line["loss"] == pytest.approx(two.kind("eval")[-1]["loss"], rel=1e-5)


@pytest.fixture
def classifier():
    with classifier_task.registered():
        yield


@pytest.mark.usefixtures("classifier")
def test_deepspeed_refuses_experts_and_the_field(tmp_path, monkeypatch):
    def command(name: str, *flags) -> tuple[list, list[str]]:
        argv = [*routed_model.recipe(tmp_path, max_steps=3, dtype="float32"), *flags, "--output_dir", "run"]
        env = kit.where("zero2", 2, mixed_precision="no")
        return kit.run_command("train.py", *argv, folder=tmp_path / name / "here", world=2, env=env)

    monkeypatch.setattr(classifier_task.Task, "build", routed_model.build)
    codes, texts = command("experts")
    assert codes == [2, 2], texts
    assert "experts" in texts[0]
    options = {"dense": True, "frozen": ("experts.1", "experts.2", "experts.3", "experts.4")}
    monkeypatch.setattr(classifier_task.Task, "build", partialmethod(routed_model.build, **options))
    codes, texts = command("zero")
    assert codes == [0, 0], texts
    codes, texts = command("refused", *unused.ALLOW)
    assert codes == [2, 2], texts
