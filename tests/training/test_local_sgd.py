"""Local SGD: ranks update alone; where they average, their states are the same to the last bit, and a checkpoint holds them."""

import math
import os
import shutil
import signal
import threading
import time
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
from tests.helpers import kit

pytestmark = pytest.mark.cluster

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
    found = checkpoint_list.list_checkpoints(folder)
    return {path.name: kit.load_weights(path) | kit.load_weights(path, "optimizer") for path in found}


# ---- the mathematics -----------------------------------------------------------------------------------------------------

PLAIN = {"optim": "sgd", "adam_beta1": 0.0, "max_grad_norm": 0.0, "learning_rate": 0.1, "dtype": "float64"}


def test_plain_sgd_averaged_after_every_step_is_ddp(tiny, tmp_path):
    """Also where the shares of the ranks weigh differently, and one has nothing: the tail of an epoch, at step 11."""
    values, every = PLAIN | {"max_steps": 12, "per_device_batch_size": 4}, {"ddp": None, "each": 1, "seldom": 3}
    runs = {
        name: kit.run_training(2, tmp_path / name, *recipe(tiny, **values, local_sgd_steps=steps))
        for name, steps in every.items()
    }
    assert kit.distance(runs["ddp"].weights, runs["each"].weights) <= 1e-10
    assert runs["each"].losses() == pytest.approx(runs["ddp"].losses(), rel=1e-10)
    assert kit.distance(runs["ddp"].weights, runs["seldom"].weights) > 1e-6  # the same measure sees other mathematics


# ---- what is sent --------------------------------------------------------------------------------------------------------


def _sent(argv, wrapped: bool) -> tuple[int, list[int], list[int]]:
    """Train on this rank; return the model's size, the sizes of the vectors that all agreed on, and how many numbers gloo
    added up in each reduction, falling."""
    from torch.profiler import ProfilerActivity, profile

    size, vectors, call = [], [], HostGroup.sum
    kit.after_prepare(lambda strategy, module, optimizer: size.append(sum(p.numel() for p in module.parameters())))
    if wrapped:  # the mutant: DDP's wrapper stays
        accelerate.Accelerator.unwrap_model = lambda self, module: module
    HostGroup.sum = lambda self, values: (vectors.append(len(values)), call(self, values))[1]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        train.main([str(word) for word in argv])
    shapes = [event.input_shapes[0] for event in recorded.events() if event.name == "gloo:all_reduce"]
    return size[0], vectors, sorted((math.prod(shape) for shape in shapes), reverse=True)


def test_no_gradient_is_reduced_and_a_step_costs_the_one_vector_that_it_costs_anyway(tiny, tmp_path):
    """In five steps there are two averages, each of weights and two moments; all else that is sent has a few numbers."""
    data = {name: value for name, value in tiny.items() if name != "validation_file"}
    argv = [*recipe(data, max_steps=5, logging_steps=100), "--output_dir", tmp_path / "run"]
    for size, vectors, sent in kit.spawn(2, _sent, argv, False, out=tmp_path / "out"):
        assert sent[:6] == [size] * 6
        assert sent[6] < 100  # the number of updates of each parameter
        assert vectors[:8] == [
            9,
            9,
            9,
            2,
            3,
            9,
            9,
            2,
        ]  # an average adds one number a rank; the save then adds up losses
    size, _, mutant = kit.spawn(2, _sent, [*argv, "--resume", "never"], True, out=tmp_path / "mutant")[0]
    assert sum(mutant) - sum(sent) >= 5 * size


# ---- the same on all ranks -----------------------------------------------------------------------------------------------


def _snapshots(argv) -> dict:
    """Train on this rank; return weights and moments at the start, after every update, and after every average."""
    found, begin, update, steps = {}, LocalSGD.__init__, train.optimizer_step, [0]
    average = LocalSGD.average

    def state(optimizer) -> dict[str, torch.Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        every = {f"{i}": p.detach() for i, p in enumerate(parameters)}
        every |= {f"{i}/{k}": v for i, p in enumerate(parameters) for k, v in optimizer.state.get(p, {}).items()}
        return {name: value.clone() for name, value in every.items()}

    def begun(self, *args):
        begin(self, *args)
        found["begin"] = state(self.optimizer)

    def averaged(self):
        average(self)
        found["average", self.state.step] = state(self.optimizer)

    def updated(strategy, module, optimizer, *rest):
        result = update(strategy, module, optimizer, *rest)
        steps[0] += 1
        found["update", steps[0]] = state(optimizer)
        return result

    LocalSGD.__init__, LocalSGD.average, train.optimizer_step = begun, averaged, updated
    train.main([str(word) for word in argv])
    found["final"] = kit.load_weights(Path(argv[-1]) / "final")
    return found


def without_moments(monkeypatch) -> None:
    """The mutant: weights are averaged and moments are not, as in accelerate's LocalSGD."""
    mean = LocalSGD._average_tensors

    def first(self, tensors):
        if isinstance(tensors[0], torch.nn.Parameter):
            mean(self, tensors)

    monkeypatch.setattr(LocalSGD, "_average_tensors", first)


def test_after_an_average_all_ranks_have_the_same_weights_and_moments(tiny, tmp_path):
    argv = [*recipe(tiny), "--output_dir", tmp_path / "run"]
    first, *others = kit.spawn(3, _snapshots, argv, out=tmp_path / "out")
    averages = [at for at in first if at[0] == "average"]
    assert averages == [("average", step) for step in (3, 6, 9, 10)]
    moments = {name.split("/")[1] for name in first[averages[0]] if "/" in name}
    assert moments == {"step", "exp_avg", "exp_avg_sq"}
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
    with pytest.MonkeyPatch.context() as patch:
        kit.exit_in_update(step, patch)
        with pytest.raises(kit.RankFailed) as failed:
            kit.run_training(2, folder, *recipe(tiny))
    assert 9 in failed.value.codes
    return kit.run_training(2, folder, *recipe(tiny))


def check_resumed(run: kit.Run, straight: kit.Run) -> None:
    assert "Resuming from step" in (run.folder.with_suffix(".out") / "rank0.txt").read_text()
    assert kit.same(run.weights, straight.weights)
    assert kit.timeless(run.folder) == kit.timeless(straight.folder)
    assert states(run.folder).keys() == states(straight.folder).keys()
    for name, state in states(run.folder).items():
        assert kit.same(state, states(straight.folder)[name])
        told = [checkpoint_list.read_state(one.folder / "checkpoints" / name)["progress"] for one in (run, straight)]
        assert told[0] == told[1]


def test_killed_and_resumed_it_is_the_undisturbed_run(tiny, tmp_path):
    straight = kit.run_training(2, tmp_path / "straight", *recipe(tiny))
    check_resumed(resumed(tiny, tmp_path / "run", 8), straight)


def test_mutant_that_averages_weights_alone_is_caught(tiny, tmp_path, monkeypatch):
    without_moments(monkeypatch)
    straight = kit.run_training(2, tmp_path / "straight", *recipe(tiny))
    shutil.copytree(tmp_path / "straight", tmp_path / "run")  # as if it had been killed after step 6
    for name in ("checkpoints/step_00000009", "checkpoints/step_00000010", "final"):
        shutil.rmtree(tmp_path / "run" / name)
    with pytest.raises(AssertionError):
        check_resumed(kit.run_training(2, tmp_path / "run", *recipe(tiny)), straight)


# ---- what one rank alone meets -------------------------------------------------------------------------------------------


def poison(monkeypatch, steps) -> None:
    """Make the loss of the first micro-batch of rank 1 not a number in these steps."""
    gradient, loss, armed = train.compute_gradient, causal_lm.Task.loss, [False]

    def noting(strategy, module, window, *rest):
        armed[0] = window[0][0].step + 1 in steps and strategy.accelerator.process_index == 1
        return gradient(strategy, module, window, *rest)

    def poisoned(self, model, inputs):
        sums = loss(self, model, inputs)
        if armed[0] and model.training:
            armed[0] = False
            sums = sums | {"loss": sums["loss"] * float("nan")}
        return sums

    monkeypatch.setattr(train, "compute_gradient", noting)
    monkeypatch.setattr(causal_lm.Task, "loss", poisoned)


def test_a_loss_that_is_not_finite_leaves_out_the_update_of_its_rank_only(tiny, tmp_path, monkeypatch):
    """Also the very first, after which torch's SGD would have momentum on the other rank only; the schedule stays that of all."""
    wrong = {1, 5}
    poison(monkeypatch, wrong)
    argv = [*recipe(tiny, optim="sgd"), "--output_dir", tmp_path / "run"]
    good, bad = kit.spawn(2, _snapshots, argv, out=tmp_path / "out")
    before = {step: ("average", step - 1) if step % 3 == 1 else ("update", step - 1) for step in range(2, STEPS + 1)}
    for step, at in ({1: "begin"} | before).items():
        assert kit.same(bad["update", step], bad[at]) == (step in wrong)
        assert not kit.same(good["update", step], good[at])
    for step in (3, 6, 9, 10):
        assert kit.same(good["average", step], bad["average", step])
        assert all(value.isfinite().all() for value in good["average", step].values())
        told = checkpoint_list.read_state(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")["progress"]
        assert (told["updates"], told["skipped"]) == (step, 0)
    lines = kit.Run(tmp_path / "run").kind("train")
    assert [line["learning_rate"] for line in lines] == pytest.approx([3e-3 * (1 - s / STEPS) for s in range(STEPS)])
    assert [line["step"] for line in lines if line["loss"] is None] == [1, 5]
    said = [(tmp_path / "out" / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    assert "is not finite" not in said[0]
    for step in wrong:
        assert f"warning: rank 1, step {step}: the loss of examples [" in said[1]
    assert "the update is left out on this rank, no weight or moment has changed" in said[1]


def test_a_rank_that_leaves_out_too_many_in_a_row_ends_all_at_the_next_average(tiny, tmp_path, monkeypatch):
    poison(monkeypatch, {1, 2, 5, 6, 7, 8, 9})
    update = train.optimizer_step

    def after_the_save(*args):  # or the end would come before the disk has the checkpoint
        for thread in threading.enumerate():
            if thread.name == "checkpoint writer":
                thread.join()
        return update(*args)

    monkeypatch.setattr(train, "optimizer_step", after_the_save)
    (tmp_path / "here").mkdir()
    flags = [*recipe(tiny, max_skipped_steps=4), "--output_dir", "run"]
    codes, texts = kit.run_command("train.py", *flags, folder=tmp_path / "here", world=2)
    assert codes == [1, 1], texts
    said = "failed: 5 updates in a row were left out on some rank because the loss or the gradient was not finite, the last"
    assert f"{said} at step 9 (max_skipped_steps)" in texts[0].rstrip().splitlines()[-1]
    assert "Traceback" not in "".join(texts)
    found = checkpoint_list.list_checkpoints(tmp_path / "here" / "run")
    assert [path.name for path in found] == ["step_00000003", "step_00000006"]
    assert checkpoint_list.read_state(found[1])["progress"]["skipped"] == 2  # the main process left out none itself


# ---- between two averages ------------------------------------------------------------------------------------------------


def interrupted(monkeypatch) -> None:
    """Ask for a save in step 4, and rank 1 to stop in step 8."""
    update, count = train.optimizer_step, [0]

    def asked(strategy, *args):
        count[0] += 1
        if count[0] == 4 and strategy.accelerator.is_main_process:
            Path("run", "save").touch()
            kit.until(lambda: not Path("run", "save").exists())
            time.sleep(0.1)
        if count[0] == 8 and strategy.accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return update(strategy, *args)

    monkeypatch.setattr(train, "optimizer_step", asked)


def test_a_save_or_a_stop_that_somebody_asks_for_averages_first(tiny, tmp_path, monkeypatch):
    """Every save compares the replicas: a run that goes through has saved what all of them hold."""
    (tmp_path / "here").mkdir()
    flags = [*recipe(tiny), "--output_dir", "run"]
    with monkeypatch.context() as patch:
        interrupted(patch)
        codes, texts = kit.run_command("train.py", *flags, folder=tmp_path / "here", world=2)
    assert codes == [75, 75], texts
    assert [checkpoint_list.step_of(path) for path in checkpoint_list.list_checkpoints(tmp_path / "here" / "run")] == [
        3,
        5,
        6,
        8,
    ]


def test_mutant_that_saves_what_one_rank_has_is_caught(tiny, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    interrupted(monkeypatch)
    average = LocalSGD.average
    monkeypatch.setattr(LocalSGD, "average", lambda self: self.state.step % 3 or average(self))
    codes, texts = kit.run_command("train.py", *recipe(tiny), "--output_dir", "run", folder=tmp_path / "here", world=2)
    assert codes == [1, 1]
    assert "the replicas are no longer the same at step 5" in texts[0]


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"save_steps": 4}, "save_steps is 4, not a multiple of local_sgd_steps, which is 3"),
        ({"eval_steps": 5}, "eval_steps is 5, not a multiple of local_sgd_steps, which is 3"),
        ({"drift_check_steps": 1}, "drift_check_steps is 1, not a multiple of local_sgd_steps, which is 3"),
        ({"ddp_comm_hook": "fp16"}, "local_sgd_steps and ddp_comm_hook are both given"),
        ({"local_sgd_steps": 0}, "local_sgd_steps is 0: it must be at least 1"),
        ({"local_sgd_steps": -1}, "local_sgd_steps is -1: it must be at least 1"),
    ],
)
def test_what_does_not_go_with_it_is_refused(tiny, fields, words):
    with pytest.raises(UsageError) as refused:
        validation.check(*parsing.parse(recipe(tiny, **fields), OPTIONS))
    assert str(refused.value).startswith(words)
    assert "\n" not in str(refused.value)
    validation.check(*parsing.parse(recipe(tiny, save_steps=6, eval_steps=9, drift_check_steps=3), OPTIONS))


def test_under_fsdp_it_is_refused_on_all_ranks(tiny, tmp_path):
    (tmp_path / "here").mkdir()
    flags = [*recipe(tiny), "--output_dir", "run"]
    codes, texts = kit.run_command("train.py", *flags, folder=tmp_path / "here", world=2, env=kit.where("fsdp2", 2))
    assert codes == [2, 2], texts
    assert "local_sgd_steps is 3, but under FSDP2 no process holds a whole model" in texts[0]


def test_fp16_is_refused():
    accelerator = SimpleNamespace(
        mixed_precision="fp16", num_processes=2, process_index=0, parallelism_config=None, device=torch.device("cpu")
    )
    cfg = RunConfig(local_sgd_steps=3)
    with pytest.raises(UsageError, match="local_sgd_steps is 3, but with fp16"):
        strategy_checks.check_settings(Strategy(accelerator, cfg), cfg)


def test_one_process_ignores_it_and_says_so(tiny, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *recipe(tiny, max_steps=1))
    assert len(run.losses()) == 1
    assert "local_sgd_steps is ignored: there is one process" in (tmp_path / "run.out" / "rank0.txt").read_text()
