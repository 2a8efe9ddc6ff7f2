"""Local SGD: ranks update alone, and where they average, their states are the same to the last bit and one checkpoint holds them."""

import json
import math
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import train
from src import checkpoint, local_sgd, strategy
from src.config import RunConfig
from src.inputs import UsageError
from src.tasks import causal_lm
from tests import kit

STEPS = 10  # averages at 3, 6, 9, and at the end


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict:
    return kit.tiny_files(tmp_path_factory.mktemp("tiny"))


def recipe(tiny, **fields) -> list[str]:
    values = {"global_batch_size": 8, "per_device_batch_size": 2, "per_device_eval_batch_size": 4, "max_steps": STEPS}
    values |= {"learning_rate": 3e-3, "logging_steps": 1, "save_steps": 3, "save_total_limit": 99, "local_sgd_steps": 3}
    return kit.flags(**{name: value for name, value in (tiny | values | fields).items() if value is not None})


def states(folder) -> dict[str, dict[str, torch.Tensor]]:
    """Return weights and moments of every checkpoint of a run, by the name of its folder."""
    return {
        path.name: kit.load_weights(path) | kit.load_weights(path, "optimizer")
        for path in checkpoint.checkpoints(folder)
    }


def same_states(one, other) -> bool:
    one, other = states(one), states(other)
    return one.keys() == other.keys() and all(kit.same(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory) -> kit.Run:
    return kit.run_training(2, tmp_path_factory.mktemp("straight") / "run", *recipe(tiny))


# ---- the mathematics -----------------------------------------------------------------------------------------------------

PLAIN = {"optim": "sgd", "adam_beta1": 0.0, "max_grad_norm": 0.0, "learning_rate": 0.1, "dtype": "float64"}


@pytest.mark.parametrize("world", [2, 3])
def test_plain_sgd_averaged_after_every_step_is_ddp(tiny, tmp_path, world):
    """Also on three ranks, whose shares of a global batch are of different sizes, and one has nothing in the epoch's tail."""
    ddp = kit.run_training(world, tmp_path / "ddp", *recipe(tiny, **PLAIN, max_steps=14, local_sgd_steps=None))
    each = kit.run_training(world, tmp_path / "each", *recipe(tiny, **PLAIN, max_steps=14, local_sgd_steps=1))
    assert kit.distance(ddp.weights, each.weights) <= 1e-10
    assert each.losses() == pytest.approx(ddp.losses(), rel=1e-10)
    if world == 2:  # the mutant: what is averaged less often is not DDP, and the same measure sees it
        seldom = kit.run_training(world, tmp_path / "seldom", *recipe(tiny, **PLAIN, max_steps=14))
        assert kit.distance(ddp.weights, seldom.weights) > 1e-6


# ---- what is sent --------------------------------------------------------------------------------------------------------


def _sent(argv, wrapped: bool) -> list[list[int]]:
    """Train on this rank; return for each step how many numbers each of gloo's reductions since the last one had."""
    from torch.profiler import ProfilerActivity, profile

    if wrapped:  # the mutant: DDP's wrapper stays
        begin = local_sgd.begin
        local_sgd.begin = lambda a, b, c, module, *rest: (module, begin(a, b, c, module, *rest)[1])
    steps, recorded = [], []
    gradient, add = train.gradient, train.Meter.add

    def begun(*args):
        recorded.append(profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True))
        recorded[-1].start()
        return gradient(*args)

    def ended(*args):  # after the update, before an average
        recorded[-1].stop()
        shapes = [e.input_shapes for e in recorded[-1].events() if e.name == "gloo:all_reduce"]
        steps.append([math.prod(shape[0]) if shape and shape[0] else 0 for shape in shapes])
        return add(*args)

    train.gradient, train.Meter.add = begun, ended
    train.main([str(word) for word in argv])
    return steps


def test_no_gradient_is_reduced(tiny, tmp_path):
    argv = [*recipe(tiny, max_steps=4), "--output_dir", tmp_path / "run"]
    assert kit.spawn(2, _sent, argv, False, out=tmp_path / "out") == [[[]] * 4] * 2
    mutant = kit.spawn(2, _sent, [*argv, "--resume", "never"], True, out=tmp_path / "mutant")
    assert all(sent for steps in mutant for sent in steps)


def _vectors(argv) -> list[int]:
    """Train on this rank; return the sizes of the vectors that all ranks agreed on."""
    from src import launch

    sizes, call = [], launch.Agreement.__call__
    launch.Agreement.__call__ = lambda self, values: (sizes.append(len(values)), call(self, values))[1]
    train.main([str(word) for word in argv])
    return sizes


def test_a_step_costs_the_one_vector_that_it_costs_anyway(tiny, tmp_path):
    fields = {"max_steps": 5, "local_sgd_steps": 4, "save_steps": 8, "logging_steps": 100, "validation_file": None}
    argv = [*recipe({k: v for k, v in tiny.items() if k != "validation_file"}, **fields), "--output_dir", tmp_path / "run"]
    for sizes in kit.spawn(2, _vectors, argv, out=tmp_path / "out"):
        assert sizes[:7] == [9, 9, 9, 9, 2, 9, 2]  # the averages of steps 4 and 5 add one number a rank


# ---- the same on all ranks -----------------------------------------------------------------------------------------------


def _snapshots(argv, momentless: bool = False) -> dict:
    """Train on this rank; return weights and moments after every update, and after every step's average, if there was one."""
    _without_moments() if momentless else None
    found, begin, update, steps = {}, local_sgd.begin, train.update, [0]

    def state(objects) -> dict[str, torch.Tensor]:
        parameters = [p for group in objects.param_groups for p in group["params"]]
        every = {f"{i}": p.detach() for i, p in enumerate(parameters)}
        every |= {f"{i}/{k}": v for i, p in enumerate(parameters) for k, v in objects.state.get(p, {}).items()}
        return {name: value.clone() for name, value in every.items()}

    def begun(accelerator, agree, run, module, optimizer, progress):
        module, average = begin(accelerator, agree, run, module, optimizer, progress)
        found["begin"] = state(optimizer)

        def averaged():
            average()
            found["average", progress.step] = state(optimizer)

        return module, averaged

    def updated(accelerator, module, optimizer, *rest):
        result = update(accelerator, module, optimizer, *rest)
        steps[0] += 1
        found["update", steps[0]] = state(optimizer)
        return result

    local_sgd.begin, train.update = begun, updated
    train.main([str(word) for word in argv])
    found["final"] = kit.load_weights(Path(argv[-1]) / "final")
    return found


def _without_moments() -> None:
    """The mutant: weights are averaged and moments are not, as in accelerate's LocalSGD."""
    mean, count = local_sgd.Average._mean, [0]

    def first(self, tensors):
        if isinstance(tensors[0], torch.nn.Parameter):
            mean(self, tensors)

    local_sgd.Average._mean = first
    assert count == [0]


@pytest.mark.parametrize("world, optim", [(2, "adamw"), (3, "sgd")])
def test_after_an_average_all_ranks_have_the_same_weights_and_moments(tiny, tmp_path, world, optim):
    argv = [*recipe(tiny, optim=optim), "--output_dir", tmp_path / "run"]
    first, *others = kit.spawn(world, _snapshots, argv, out=tmp_path / "out")
    averages = [at for at in first if at[0] == "average"]
    assert averages == [("average", step) for step in (3, 6, 9, 10)]
    moments = {name.split("/")[1] for name in first[averages[0]] if "/" in name}
    assert moments == ({"step", "exp_avg", "exp_avg_sq"} if optim == "adamw" else {"momentum_buffer"})
    for other in others:
        assert all(kit.same(first[at], other[at]) for at in ["begin", *averages])
        assert not any(kit.same(first["update", step], other["update", step]) for step in range(1, STEPS + 1))
    # The mean, and not the state of some rank.
    ranks = [first, *others]
    for name, value in first["average", 6].items():
        mean = torch.stack([rank["update", 6][name].double() for rank in ranks]).mean(0)
        assert torch.allclose(value.double(), mean, rtol=1e-6, atol=1e-9)
    saved = states(tmp_path / "run")
    assert [*saved] == [f"step_{step:08d}" for step in (3, 6, 9, 10)]
    weight = saved["step_00000010"]["transformer.ln_f.weight"]
    assert any(torch.equal(weight, value) for value in first["average", 10].values())
    assert torch.equal(weight, first["final"]["transformer.ln_f.weight"])


# ---- killed and resumed --------------------------------------------------------------------------------------------------


def resumed(tiny, folder, step: int) -> kit.Run:
    """Train, die in the update of `step` when the save before it is done, and train on."""
    update, savers, create = train.update, [], train.Saver.__init__

    def created(self, *args, **kwargs):
        savers.append(self)
        create(self, *args, **kwargs)

    count = [0]

    def dies(*args):
        count[0] += 1
        if count[0] == step:
            savers[0].wait()
            os._exit(9)
        return update(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "update", dies)
        patch.setattr(train.Saver, "__init__", created)
        with pytest.raises(kit.RankFailed) as failed:
            kit.run_training(2, folder, *recipe(tiny))
    assert 9 in failed.value.codes
    run = kit.run_training(2, folder, *recipe(tiny))
    assert "going on from" in (folder.with_suffix(".out") / "rank0.txt").read_text()
    return run


def test_killed_and_resumed_it_is_the_undisturbed_run(tiny, straight, tmp_path):
    run = resumed(tiny, tmp_path / "run", 8)
    assert kit.same(run.weights, straight.weights)
    assert kit.timeless(run.folder) == kit.timeless(straight.folder)
    assert same_states(run.folder, straight.folder)


def test_mutant_that_averages_weights_alone_is_caught(tiny, tmp_path, monkeypatch):
    _ = _without_moments
    with monkeypatch.context() as patch:
        patch.setattr(local_sgd.Average, "_mean", local_sgd.Average._mean)
        _without_moments()
        whole = kit.run_training(2, tmp_path / "whole", *recipe(tiny))
        run = resumed(tiny, tmp_path / "run", 8)
    assert not kit.same(run.weights, whole.weights)
