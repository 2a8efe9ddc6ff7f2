"""Local SGD: ranks update alone; where they average, their states are equal to the last bit, and a checkpoint holds them."""

import math
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch

import train
from src.checkpointing import checkpoint_list
from src.config import parsing, validation
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.distributed import strategy_checks
from src.distributed.host_group import HostGroup
from src.distributed.strategies import Strategy
from src.tasks import OPTIONS, causal_lm
from src.training.local_sgd import LocalSGD
from tests.helpers import kit, technique_runs
from tests.helpers.stopping import send_here

pytestmark = pytest.mark.cluster
STEPS = 10
AVERAGES = (3, 6, 9, 10)


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory) -> kit.Run:
    return kit.run_training(2, tmp_path_factory.mktemp("straight") / "run", *recipe(tiny))


def recipe(tiny, **fields) -> list[str]:
    values = {"global_batch_size": 8, "per_device_batch_size": 2, "per_device_eval_batch_size": 4, "max_steps": STEPS}
    values |= {"learning_rate": 3e-3, "logging_steps": 1, "save_steps": 3, "save_total_limit": 99, "local_sgd_steps": 3}
    return kit.flags(**{name: value for name, value in (tiny | values | fields).items() if value is not None})


def command(tiny, folder: Path, **rest) -> tuple[list, list[str]]:
    fields, env = rest.pop("fields", {}), rest.pop("env", None)
    return kit.run_command("train.py", *recipe(tiny, **fields), "--output_dir", "run", folder=folder, world=2, env=env)


def states(folder) -> dict[str, dict[str, torch.Tensor]]:
    """Return weights and moments of every checkpoint of a run, by the name of its folder."""
    found = checkpoint_list.list_checkpoints(folder)
    return {path.name: kit.load_weights(path) | kit.load_weights(path, "optimizer") for path in found}


def progress_at(folder: Path, step: int) -> dict:
    return checkpoint_list.read_state(folder / "checkpoints" / f"step_{step:08d}")["progress"]


# ---- the mathematics ---------------------------------------------------------------------------------------------------


def test_plain_sgd_averaged_after_every_step_is_ddp(tiny, tmp_path):
    """Also where the shares of the ranks weigh differently, and one has nothing: the tail of an epoch, at step 11."""
    plain = {"optim": "sgd", "adam_beta1": 0.0, "max_grad_norm": 0.0, "learning_rate": 0.1, "dtype": "float64"}
    plain |= {"max_steps": 12, "per_device_batch_size": 4}
    runs = {
        every: kit.run_training(2, tmp_path / f"{every}", *recipe(tiny, **plain, local_sgd_steps=every))
        for every in (None, 1, 3)
    }
    assert kit.distance(runs[None].weights, runs[1].weights) <= 1e-10
    assert runs[1].losses() == pytest.approx(runs[None].losses(), rel=1e-10)
    assert kit.distance(runs[None].weights, runs[3].weights) > 1e-6  # the same measure sees other mathematics


# ---- what is sent ------------------------------------------------------------------------------------------------------


def _sent(argv, mutant: bool) -> tuple[int, list[int], list[int]]:
    """Train on this rank; return the model's size, the sizes of the vectors summed on the host, and how many numbers gloo
    added in each reduction, falling."""
    from torch.profiler import ProfilerActivity, profile

    size, vectors, call = [], [], HostGroup.sum
    kit.after_prepare(lambda strategy, module, optimizer: size.append(sum(p.numel() for p in module.parameters())))
    HostGroup.sum = lambda self, values: (vectors.append(len(values)), call(self, values))[1]
    if mutant:  # DDP's wrapper stays
        accelerate.Accelerator.unwrap_model = lambda self, module: module
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        train.main([str(word) for word in argv])
    shapes = [event.input_shapes[0] for event in recorded.events() if event.name == "gloo:all_reduce"]
    return size[0], vectors, sorted((math.prod(shape) for shape in shapes), reverse=True)


def test_no_gradient_is_reduced_and_a_step_costs_one_small_vector(tiny, tmp_path):
    """In five steps there are two averages, each of weights and two moments; all else that is sent has a few numbers."""
    data = {name: value for name, value in tiny.items() if name != "validation_file"}
    argv = [*recipe(data, max_steps=5, logging_steps=100), "--output_dir", tmp_path / "run"]
    for size, vectors, sent in kit.spawn(2, _sent, argv, False, out=tmp_path / "out"):
        assert sent[:6] == [size] * 6
        assert sent[6] < 100  # the number of updates of each parameter
        # One number before the first step; an average sums one per rank, and the save at step 3 the losses and a count of new names.
        assert vectors[:9] == [1, 10, 10, 10, 2, 4, 10, 10, 2]
    size, _, mutant = kit.spawn(2, _sent, [*argv, "--resume", "never"], True, out=tmp_path / "mutant")[0]
    assert sum(mutant) - sum(sent) >= 5 * size


# ---- the same on all ranks ---------------------------------------------------------------------------------------------


def _snapshots(argv) -> dict:
    """Train on this rank; return weights and moments at the start, after every update, and after every average."""
    found, steps = {}, [0]
    create, average, update = LocalSGD.__init__, LocalSGD.average, train.optimizer_step

    def state_of(optimizer) -> dict[str, torch.Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        values = {f"{i}": p.detach() for i, p in enumerate(parameters)}
        values |= {f"{i}/{k}": v for i, p in enumerate(parameters) for k, v in optimizer.state.get(p, {}).items()}
        return {name: value.clone() for name, value in values.items()}

    def created(self, *args):
        create(self, *args)
        found["begin"] = state_of(self.optimizer)

    def averaged(self):
        average(self)
        found["average", self.state.step] = state_of(self.optimizer)

    def updated(strategy, module, optimizer, *rest):
        result = update(strategy, module, optimizer, *rest)
        steps[0] += 1
        found["update", steps[0]] = state_of(optimizer)
        return result

    LocalSGD.__init__, LocalSGD.average, train.optimizer_step = created, averaged, updated
    train.main([str(word) for word in argv])
    found["final"] = kit.load_weights(Path(argv[-1]) / "final")
    return found


def test_after_an_average_all_ranks_have_the_same_weights_and_moments(tiny, tmp_path):
    argv = [*recipe(tiny), "--output_dir", tmp_path / "run"]
    first, *others = ranks = kit.spawn(3, _snapshots, argv, out=tmp_path / "out")
    averages = [at for at in first if at[0] == "average"]
    assert averages == [("average", step) for step in AVERAGES]
    assert {name.split("/")[1] for name in first[averages[0]] if "/" in name} == {"step", "exp_avg", "exp_avg_sq"}
    for other in others:
        assert all(kit.same(first[at], other[at]) for at in ["begin", *averages])
        assert not any(kit.same(first["update", step], other["update", step]) for step in range(1, STEPS + 1))
    # The mean, and not the state of some rank.
    for name, value in first["average", 6].items():
        mean = torch.stack([rank["update", 6][name].double() for rank in ranks]).mean(0)
        assert torch.allclose(value.double(), mean, rtol=1e-6, atol=1e-9)
    saved = states(tmp_path / "run")
    assert [*saved] == [f"step_{step:08d}" for step in AVERAGES]
    weight = saved["step_00000010"]["transformer.ln_f.weight"]
    assert any(torch.equal(weight, value) for value in first["average", 10].values())
    assert torch.equal(weight, first["final"]["transformer.ln_f.weight"])


# ---- killed and resumed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", [False, True])
def test_killed_and_resumed_is_bitwise_the_same(tiny, straight, tmp_path, monkeypatch, mutant):
    """Killed after step 6. The mutant averages weights and not moments, as accelerate's LocalSGD does."""
    if mutant:
        average = LocalSGD._average_tensors

        def weights_only(self, tensors):
            if isinstance(tensors[0], torch.nn.Parameter):
                average(self, tensors)

        monkeypatch.setattr(LocalSGD, "_average_tensors", weights_only)
        straight = kit.run_training(2, tmp_path / "straight", *recipe(tiny))
    shutil.copytree(straight.folder, tmp_path / "run")
    for name in ("checkpoints/step_00000009", "checkpoints/step_00000010", "final"):
        shutil.rmtree(tmp_path / "run" / name)
    run = kit.run_training(2, tmp_path / "run", *recipe(tiny))
    assert kit.same(run.weights, straight.weights) == (not mutant)
    assert (kit.timeless(run.folder) == kit.timeless(straight.folder)) == (not mutant)
    if not mutant:
        assert states(run.folder).keys() == states(straight.folder).keys()
        assert all(kit.same(state, states(straight.folder)[name]) for name, state in states(run.folder).items())
        assert all(progress_at(run.folder, step) == progress_at(straight.folder, step) for step in AVERAGES)


def test_resumed_from_one_process_that_had_not_trained_all_weights(tmp_path, monkeypatch):
    """Rank 1 skips the first updates of the others; all ranks average the same moments, also those that rank 1 lacks."""
    more = {"optim": "sgd", "local_sgd_steps": 2, "techniques": '{"unfreeze": {"steps": {"*.mlp.*": 3}}}'}
    values = technique_runs.files(tmp_path) | more
    technique_runs.train(tmp_path / "run", values, 1, 4, max_steps=2)
    shutil.rmtree(tmp_path / "run" / "final")
    poison(monkeypatch, {3, 4})
    run = technique_runs.train(tmp_path / "run", values, 2, 4, ddp_timeout=60)
    assert [line["step"] for line in run.kind("train") if line["loss"] is None] == [3, 4]
    assert all(value.isfinite().all() for value in run.weights.values())


def test_momentum_that_only_cycle_momentum_turns_on(tmp_path, monkeypatch):
    """Rank 1 skips all updates before the first average, and has a momentum to average, too."""
    more = {"optim": "sgd", "adam_beta1": 0.0, "local_sgd_steps": 2, "max_steps": 4, "lr_scheduler_type": "one_cycle"}
    poison(monkeypatch, {1, 2})
    values = technique_runs.files(tmp_path) | more | {"techniques": '{"cycle_momentum": null}'}
    run = technique_runs.train(tmp_path / "run", values, 2, 4, ddp_timeout=60)
    assert all(value.isfinite().all() for value in run.weights.values())


# ---- losses that are not finite on one rank ----------------------------------------------------------------------------


def poison(monkeypatch, steps) -> None:
    """Make the loss of the first micro-batch of rank 1 NaN in these steps."""
    gradient, loss, armed = train.compute_gradient, causal_lm.Task.loss, [False]

    def noting(strategy, module, window, weight):
        armed[0] = window[0][0].step + 1 in steps and strategy.data_rank == 1
        return gradient(strategy, module, window, weight)

    def poisoned(self, model, inputs):
        sums = loss(self, model, inputs)
        if armed[0] and model.training:
            armed[0] = False
            sums = sums | {"loss": sums["loss"] * float("nan")}
        return sums

    monkeypatch.setattr(train, "compute_gradient", noting)
    monkeypatch.setattr(causal_lm.Task, "loss", poisoned)


def test_a_nan_loss_skips_the_update_of_its_rank_only(tiny, tmp_path, monkeypatch):
    """Also the very first, after which torch's SGD would have momentum on the other rank only. The schedule is shared."""
    wrong = {1, 5}
    poison(monkeypatch, wrong)
    argv = [*recipe(tiny, optim="sgd"), "--output_dir", tmp_path / "run"]
    good, bad = kit.spawn(2, _snapshots, argv, out=tmp_path / "out")
    for step in range(1, STEPS + 1):
        before = "begin" if step == 1 else ("average" if step % 3 == 1 else "update", step - 1)
        assert kit.same(bad["update", step], bad[before]) == (step in wrong)
        assert not kit.same(good["update", step], good[before])
    for step in AVERAGES:
        assert kit.same(good["average", step], bad["average", step])
        assert all(value.isfinite().all() for value in good["average", step].values())
        progress = progress_at(tmp_path / "run", step)
        assert (progress["updates"], progress["skipped"]) == (step, 0)
    lines = kit.Run(tmp_path / "run").kind("train")
    assert [line["learning_rate"] for line in lines] == pytest.approx([3e-3 * (1 - s / STEPS) for s in range(STEPS)])
    assert {line["step"] for line in lines if line["loss"] is None} == wrong
    printed = [(tmp_path / "out" / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    assert "is not finite" not in printed[0]
    assert all(f"warning: rank 1, step {step}: the loss of examples [" in printed[1] for step in wrong)


def test_too_many_skipped_updates_end_all_ranks_at_the_next_average(tiny, tmp_path, monkeypatch):
    poison(monkeypatch, {1, 2, 5, 6, 7, 8, 9})
    codes, texts = command(tiny, tmp_path / "here", fields={"max_skipped_steps": 4})
    assert codes == [1, 1], texts
    said = "".join(texts)
    assert all(word in said for word in ("failed: 5 updates", "step 9", "max_skipped_steps"))
    assert "Traceback" not in "".join(texts)
    found = checkpoint_list.list_checkpoints(tmp_path / "here" / "run")
    assert [path.name for path in found] == ["step_00000003", "step_00000006"]
    assert progress_at(tmp_path / "here" / "run", 6)["skipped"] == 2  # the main process has skipped none itself


# ---- between two averages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", [False, True])
def test_a_requested_save_or_stop_averages_first(tiny, tmp_path, monkeypatch, mutant):
    """A save is requested in step 4, a stop on rank 1 in step 8. The mutant saves what one rank has, and the replica check
    finds it."""
    update, average, count = train.optimizer_step, LocalSGD.average, [0]

    def requesting(strategy, *args):
        count[0] += 1
        if count[0] == 4 and strategy.accelerator.is_main_process:
            Path("run", "save").touch()
            kit.until(lambda: not Path("run", "save").exists())
        if count[0] == 8 and not strategy.accelerator.is_main_process:
            send_here(signal.SIGTERM)
        return update(strategy, *args)

    monkeypatch.setattr(train, "optimizer_step", requesting)
    if mutant:
        monkeypatch.setattr(LocalSGD, "average", lambda self: self.state.step % 3 or average(self))
    codes, texts = command(tiny, tmp_path / "here")
    assert codes == ([1, 1] if mutant else [75, 75]), texts
    assert ("differ at step 5" in "".join(texts)) == mutant
    steps = [checkpoint_list.step_of(path) for path in checkpoint_list.list_checkpoints(tmp_path / "here" / "run")]
    assert steps == ([3] if mutant else [3, 5, 6, 8])


# ---- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"save_steps": 4}, "save_steps is 4"),
        ({"eval_steps": 5}, "eval_steps is 5"),
        ({"drift_check_steps": 1}, "drift_check_steps is 1"),
        ({"ddp_comm_hook": "fp16"}, "ddp_comm_hook"),
        ({"local_sgd_steps": 0}, "local_sgd_steps is 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tiny, fields, words):
    with pytest.raises(UsageError, match=words) as refused:
        validation.check(*parsing.parse(recipe(tiny, **fields), OPTIONS))
    assert "local_sgd_steps" in str(refused.value)
    validation.check(*parsing.parse(recipe(tiny, save_steps=6, eval_steps=9, drift_check_steps=3), OPTIONS))


def test_fsdp2_refuses_it_on_all_ranks(tiny, tmp_path):
    codes, texts = command(tiny, tmp_path / "here", env=kit.where("fsdp2", 2))
    assert codes == [2, 2], texts
    assert "local_sgd_steps is 3, but under FSDP2" in "".join(texts)


@pytest.mark.parametrize("world, message", [(2, "fp16"), (1, "local_sgd_steps is ignored")])
def test_fp16_and_one_process(world, message, capsys):
    """fp16 is refused among several processes; one process ignores local SGD."""
    group = {"num_processes": world, "process_index": 0, "parallelism_config": None, "device": torch.device("cpu")}
    strategy = Strategy(SimpleNamespace(mixed_precision="fp16", **group), RunConfig(local_sgd_steps=3))
    assert strategy.uses_local_sgd == (world == 2)
    if world == 2:
        with pytest.raises(UsageError, match=f"local_sgd_steps is 3, but with {message}"):
            strategy_checks.check_settings(strategy, RunConfig(local_sgd_steps=3))
    else:
        strategy_checks.check_settings(strategy, RunConfig(local_sgd_steps=3))
        assert message in capsys.readouterr().err
