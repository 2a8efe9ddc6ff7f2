"""`exact_sums`: one SHA-256 of weights, lines and moments on any number of processes. Each mutant is caught.

tests/conformance/test_task.py compares every task."""

import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from engine.distributed import backend_checks, exact_sums
from engine.distributed.backends import Backend
from engine.distributed.running_statistics import StepBuffers
from engine.process.private_apis import replaced
from tests.helpers import batch_norm, classifier_task, kit, routed_model
from tests.helpers.fp16 import train_in_fp16
from tests.helpers.killing import train_until_killed

pytestmark = pytest.mark.conformance

BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}


def numbers(folder: Path) -> tuple[list[dict], dict[str, str]]:
    """Return all lines without times, and the SHA-256 of each file of tensors, moments included."""
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*.safetensors")}
    assert {Path(name).name for name in files} >= {"model.safetensors", "optimizer.safetensors"}
    return kit.timeless(folder), {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def run(world: int, folder: Path, *flags, **more) -> tuple[list[dict], dict[str, str]]:
    kit.run_training(world, folder, *flags, *kit.flags(exact_sums=True), **more)
    return numbers(folder)


def recipe(tiny, **fields) -> list[str]:
    """Return the flags of a run with dropout and ragged rows; the tails of its epochs, of three rows, are steps 11 and 22,
    where two of four ranks have a dummy batch."""
    values = {"global_batch_size": 8, "per_device_batch_size": 2, "per_device_eval_batch_size": 4, "max_steps": 26}
    values |= {"learning_rate": 3e-3, "logging_steps": 3, "eval_steps": 9, "save_steps": 2, "exact_sums": True}
    return kit.flags(**tiny | values | fields)


@pytest.fixture(scope="module")
def one(tiny, tmp_path_factory):
    return run(1, tmp_path_factory.mktemp("one") / "run", *recipe(tiny))


@pytest.mark.parametrize("world", [2, 4])
def test_one_hash_on_any_number_of_processes(tiny, one, tmp_path, world):
    assert run(world, tmp_path / "run", *recipe(tiny)) == one


def _train_with_threads(argv) -> int:
    torch.set_num_threads(3)
    train.main([str(word) for word in argv])
    return torch.get_num_threads()


def test_one_hash_with_any_number_of_threads(tiny, one, tmp_path):
    """The backward pass of a layer norm depends on it, for more rows than here."""
    argv = [*recipe(tiny), "--output_dir", tmp_path / "run"]
    assert kit.spawn(1, _train_with_threads, argv, out=tmp_path / "out") == [1]
    assert numbers(tmp_path / "run") == one


def test_one_hash_after_a_kill_and_other_numbers_of_processes(tiny, one, tmp_path):
    flags = recipe(tiny)
    for step, world in ((7, 2), (17, 3)):
        train_until_killed(step, world, tmp_path / "run", *flags)
    assert run(1, tmp_path / "run", *flags) == one


def test_one_hash_in_bf16(tiny, one, tmp_path):
    flags = recipe(tiny, max_steps=12, gradient_checkpointing=True)
    runs = [run(world, tmp_path / str(world), *flags, env=BF16) for world in (1, 3)]
    assert runs[0] == runs[1] != one


def test_one_hash_in_fp16(files, tmp_path):
    """The scale begins too high: the first updates are skipped, on all ranks."""
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_length": 8}
    fields |= {
        "global_batch_size": 6,
        "per_device_batch_size": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "exact_sums": True,
    }
    runs = []
    for world in (1, 2):
        argv = kit.flags(**fields, output_dir=tmp_path / str(world))
        kit.spawn(world, train_in_fp16, argv, 2.0**22, out=tmp_path / f"{world}.out")
        runs.append(numbers(tmp_path / str(world)))
    assert runs[0] == runs[1]
    assert 0 < runs[0][0][-1]["skipped"] < 6


def test_plain_sums_have_another_hash(tiny, one, tmp_path):
    plain = [kit.run_training(w, tmp_path / str(w), *recipe(tiny, exact_sums=False)).folder for w in (1, 2)]
    assert len({str(each) for each in (one, *map(numbers, plain))}) == 3


# ---- parameters that only some rows use ------------------------------------------------------------------------------


def test_experts_of_some_rows(tmp_path, monkeypatch):
    """An expert that no row of a step uses has no gradient, so neither its moments nor its decay act on it."""
    monkeypatch.setattr(classifier_task.Task, "build", routed_model.build)
    with classifier_task.registered():
        flags = routed_model.recipe(tmp_path)
        runs = [run(world, tmp_path / str(world), *flags) for world in (1, 2, 3)]
        plain = kit.run_training(1, tmp_path / "plain", *flags)
    assert runs[0] == runs[1] == runs[2]
    assert kit.distance(kit.Run(tmp_path / "1").weights, plain.weights) <= 1e-10


# ---- batch norm, and the mutants -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def statistics(tmp_path_factory):
    """A run in float64 with batch norm on one process, and its flags."""
    folder = tmp_path_factory.mktemp("statistics")
    with classifier_task.registered(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifier_task.Task, "build", batch_norm.build)
        flags = batch_norm.recipe(folder)
        yield flags, run(1, folder / "one", *flags)


def test_running_statistics(statistics, tmp_path):
    flags, alone = statistics
    assert run(3, tmp_path / "run", *flags) == alone


def _mean_over_ranks(self, totals):
    return self.data_world_size * loss_scale(self, totals)


def _put_mean(self, scale):
    put(self, scale)
    for parameter in self.parameters:
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()


def _norm_over_ranks(self, parameters, max_norm):
    """Return the norm as sharded backends have it: from a share of the parameters on each rank, summed in float."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    share = sum((gradient.square().sum() for gradient in gradients[self.data_rank :: self.data_world_size]), 0.0)
    dist.all_reduce(share)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, share.sqrt())
    return share.sqrt()


def _average_by_rank(self):
    """Set the buffers to the mean of the means of the ranks."""
    self.total = exact_sums.split_values(exact_sums.join_values(self.total) / max(self.passes, 1))
    self.passes = 1
    finish(self)


def _begin_in_float(self):
    self.is_exact = False
    begin(self)


loss_scale, put, begin, finish = Backend.loss_scale, exact_sums.GradientSums._put, StepBuffers.begin, StepBuffers.finish
MUTANTS = {
    "the factor has the number of processes": {
        (Backend, "loss_scale"): _mean_over_ranks,
        (exact_sums.GradientSums, "_put"): _put_mean,
    },
    "the norm is a float sum": {(Backend, "clip"): _norm_over_ranks},
    "statistics are averaged by rank": {(StepBuffers, "finish"): _average_by_rank},
    "statistics are float sums": {(StepBuffers, "begin"): _begin_in_float},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(statistics, tmp_path, mutant):
    flags, alone = statistics
    with replaced(MUTANTS[mutant]):
        assert run(3, tmp_path / "run", *flags) != alone


# ---- what cannot be exact --------------------------------------------------------------------------------------------


def refused(tmp_path, *flags, world=2, **more) -> str:
    """Return the last line of a command that must end with exit code 2."""
    argv = [*flags, "--exact_sums", "true", "--output_dir", "run"]
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=world, **more)
    assert codes == [2] * world, texts
    return texts[0].rstrip().splitlines()[-1]


def test_comm_hook_is_refused(tiny, tmp_path):
    assert "ddp_comm_hook" in refused(tmp_path, *recipe(tiny, ddp_comm_hook="bf16"))


@pytest.mark.cluster
def test_fsdp2_is_refused(tiny, tmp_path):
    """It evaluates a run with exact sums."""
    env = kit.where("fsdp2", 2, mixed_precision="no")
    assert "FSDP2" in refused(tmp_path, *recipe(tiny), env=env)
    run = kit.run_training(1, tmp_path / "run", *recipe(tiny, max_steps=2))
    found = kit.run_evaluation(2, tmp_path / "eval", "--checkpoint", run.folder, env=env)
    assert found["loss"] == run.kind("eval")[-1]["loss"]


def test_too_many_micro_batches_are_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(backend_checks, "ADDENDS", 3)
    assert "per_device_batch_size" in refused(tmp_path, *recipe(tiny))


def test_old_train_py_is_refused(tiny, tmp_path, monkeypatch):
    """Its gradient would be as many times too large as there are processes."""
    monkeypatch.setattr(Backend, "loss_scale", lambda self, totals: self.data_world_size / totals.weight)
    assert "loss_scale" in refused(tmp_path, *recipe(tiny))
