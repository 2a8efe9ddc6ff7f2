"""What is not finite changes nothing on any rank, is counted and named; and a run ends early on all ranks alike."""

import inspect
import json
from types import SimpleNamespace

import pytest
import torch

import train
from engine.checkpointing.checkpoint_folder import read_state
from engine.config.parsing import RunConfig
from engine.config.run_config import best_by
from engine.run.totals_and_votes import StepLosses
from engine.run.train_state import TrainState, Update
from src.tasks import causal_lm
from tests.helpers import kit
from tests.helpers.backend_runs import at_step, same_state
from tests.helpers.killing import train_until_killed

STEPS = 12  # of 8 examples; the first epoch ends after 11


def recipe(tiny, **fields) -> list[str]:
    values = {"global_batch_size": 8, "per_device_batch_size": 2, "per_device_eval_batch_size": 4, "max_steps": STEPS}
    values |= {"learning_rate": 3e-3, "logging_steps": 1, "save_steps": 1, "save_total_limit": 99, "dtype": "float64"}
    return kit.flags(**tiny | values | fields)


# ---- a fault in one micro-batch of one rank ------------------------------------------------------------------------------


def not_a_number(loss: torch.Tensor, model) -> torch.Tensor:
    return loss * float("nan")


def infinite_with_a_finite_gradient(loss: torch.Tensor, model) -> torch.Tensor:
    return loss + torch.tensor(float("inf"), dtype=loss.dtype)


def one_gradient_not_a_number(loss: torch.Tensor, model) -> torch.Tensor:
    """A finite loss; the gradient of a single parameter has a single number that is none."""
    weight = model.get_input_embeddings().weight
    return loss + (0.0 * weight[3, 3]).sqrt()


def poison(monkeypatch, fault, steps) -> None:
    """Apply `fault` to the loss of the first micro-batch of the last rank in these steps; print its examples."""
    gradient, loss, armed = train.compute_gradient, causal_lm.Task.loss, [False]

    def arming(backend, module, batch, *rest):
        micro, last = batch[0][0], backend.accelerator.num_processes - 1
        if micro.step + 1 in steps and backend.accelerator.process_index == last:
            armed[0] = True
            print(f"poisoned {micro.ids.tolist()}")
        return gradient(backend, module, batch, *rest)

    def poisoned(self, model, inputs):
        sums = loss(self, model, inputs)
        if armed[0] and model.training:
            armed[0] = False
            sums = sums | {"loss": fault(sums["loss"], model)}
        return sums

    monkeypatch.setattr(train, "compute_gradient", arming)
    monkeypatch.setattr(causal_lm.Task, "loss", poisoned)


def check_skipped(run: kit.Run, wrong: set[int]) -> None:
    """Assert that the steps of `wrong` changed nothing and were counted, and that every other step did what it does."""
    lines = {line["step"]: line for line in run.kind("train")}
    assert sorted(lines) == list(range(1, STEPS + 1))
    for at in range(2, STEPS + 1):
        assert same_state(at_step(run, at - 1), at_step(run, at)) == (at in wrong)
        assert lines[at]["skipped"] == sum(w <= at for w in wrong)
        assert read_state(at_step(run, at))["progress"]["updates"] == at - lines[at]["skipped"]
        # The schedule goes by updates: a skipped step uses its rate again.
        assert lines[at]["learning_rate"] == pytest.approx(3e-3 * (1 - (at - 1 - lines[at - 1]["skipped"]) / STEPS))
    assert all(tensor.isfinite().all() for tensor in run.weights.values())


@pytest.mark.parametrize(
    "fault, optim, what",
    [
        (infinite_with_a_finite_gradient, "adamw", "the loss of examples ["),
        (one_gradient_not_a_number, "sgd", "the gradient (here, of examples ["),
    ],
)
def test_non_finite_update_is_skipped_on_all_ranks(tiny, tmp_path, monkeypatch, fault, optim, what):
    """On 1 and 3 processes, on the last rank alone; also in the second step, and the run comes to the same on both."""
    poison(monkeypatch, fault, {2, 5})
    runs = {world: kit.run_training(world, tmp_path / f"{world}", *recipe(tiny, optim=optim)) for world in (1, 3)}
    for world, run in runs.items():
        check_skipped(run, {2, 5})
        assert kit.distance(run.weights, runs[1].weights) <= 1e-10
        said = (tmp_path / f"{world}.out" / f"rank{world - 1}.txt").read_text()
        examples = said.rpartition("poisoned [")[2].partition("]")[0]  # a gradient is that of all micro-batches
        log = (run.folder / "logs" / f"rank_{world - 1}.log").read_text()
        assert f"rank {world - 1}, step 5: {what}{examples}" in log
        if optim == "adamw":
            assert [line["loss"] is None for line in run.kind("train")] == [at in (2, 5) for at in range(1, STEPS + 1)]


def test_dummy_batches_in_front_move_no_loss_to_another_example(capsys):
    """The backend of a sharded model adds them within the gradient."""
    batch = [(SimpleNamespace(ids=torch.tensor([i]), dummy=False), None) for i in (3, 4)]
    losses = StepLosses(torch.tensor([0.0, 1.0, float("nan")]), {})
    Update(torch.tensor(True), 5, batch, losses).report(float("nan"))
    assert "step 5: the loss of examples [4] is not finite" in capsys.readouterr().err


def test_mutant_without_skipping_is_caught(tiny, tmp_path, monkeypatch):
    poison(monkeypatch, not_a_number, {5})
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones_like(tensor, dtype=torch.bool))
    run = kit.run_training(1, tmp_path / "run", *recipe(tiny))
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_skipped(run, {5})
    assert any(tensor.isnan().any() for tensor in run.weights.values())


def test_mutant_infinite_loss_that_stays_on_one_rank_is_caught(tiny, tmp_path, monkeypatch):
    """Its gradient is finite, so the norm says nothing: the loss itself has to spoil it."""
    source = inspect.getsource(train.compute_gradient)
    naive = source.replace('0.0 * out["loss"].detach() + ', "")
    assert naive != source
    scope = dict(vars(train))
    exec(naive, scope)
    monkeypatch.setattr(train, "compute_gradient", scope["compute_gradient"])
    poison(monkeypatch, infinite_with_a_finite_gradient, {5})
    run = kit.run_training(2, tmp_path / "run", *recipe(tiny))
    with pytest.raises(AssertionError):
        check_skipped(run, {5})


def test_max_skipped_steps_in_a_row_end_all_ranks(tiny, tmp_path, monkeypatch):
    """Steps 2 and 3, then a finite one, then 5, 6, 7: the third in a row, over a stop in between that keeps the count."""
    poison(monkeypatch, not_a_number, {2, 3, 5, 6, 7, 8, 9})
    flags = recipe(tiny, max_skipped_steps=3)
    train_until_killed(7, 2, tmp_path / "run", *flags)  # after step 6, the second in a row
    argv = [*flags, "--output_dir", tmp_path / "run"]
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=2)
    assert codes == [1, 1], texts
    said = "3 updates in a row were skipped because the loss or the gradient was not finite, the last at step 7"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["exit_code"]) == ("failed", 1)
    assert said in status["reason"]


def test_run_without_any_update_fails(tiny, tmp_path, monkeypatch):
    """Fewer steps than max_skipped_steps, all with a loss that is not a number."""
    poison(monkeypatch, not_a_number, range(1, STEPS + 1))
    codes, texts = kit.run_command("train.py", *recipe(tiny, output_dir="run"), folder=tmp_path, world=2)
    assert codes == [1, 1], texts
    assert f"all {STEPS} updates were skipped" in "".join(texts)
    assert not (tmp_path / "run" / "final").exists()


# ---- evaluations that end a run ------------------------------------------------------------------------------------------


def test_early_stopping_ends_all_ranks_at_one_step(tiny, tmp_path):
    """A run that learns nothing: the first evaluation is the best, so patience 2 ends it with the third, at step 9."""
    early = {"early_stopping_patience": 2, "eval_steps": 3, "save_steps": 4, "learning_rate": 0.0, "max_steps": 40}
    flags = recipe(tiny, **early)
    run = kit.run_training(2, tmp_path / "run", *flags)
    assert [line["step"] for line in run.kind("eval")] == [3, 6, 9]
    assert [line["step"] for line in run.kind("train")] == list(range(1, 10))
    assert kit.same(run.weights, kit.load_weights(at_step(run, 9)))
    assert "without metric_for_best_model, final/ is this last step" in (tmp_path / "run.out" / "rank0.txt").read_text()
    again = kit.run_training(2, run.folder, *flags)
    assert again.lines == run.lines
    assert "nothing is left to train" in (tmp_path / "run.out" / "rank0.txt").read_text()


@pytest.mark.parametrize("stops", [False, True])
def test_metric_that_is_not_finite(tiny, tmp_path, monkeypatch, stops):
    """The evaluation of step 8: by default a warning; with stop_on_nan_metric all ranks save and end with 1."""
    monkeypatch.setattr(causal_lm.Task, "metrics", lambda *_: {"accuracy": float("nan")})
    flags = recipe(tiny, eval_steps=8, save_steps=100, stop_on_nan_metric=stops, output_dir="run")
    codes, texts = kit.run_command("train.py", *flags, folder=tmp_path, world=2)
    assert codes == [int(stops)] * 2
    assert "evaluation at step 8: accuracy is nan" in "".join(texts)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{8 if stops else 12:08d}"]


# ---- values for the next train line --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_mutant", [False, True])
def test_values_of_a_step_before_the_last_line_survive_a_resume(tiny, tmp_path, monkeypatch, is_mutant):
    """Set at step 7, saved at 8, killed at 9, in the line of step 10: a tensor, a number and none."""
    add_update, saved_fields = TrainState.add_update, TrainState.saved_fields

    def add_values(self, grad_norm, *rest):
        add_update(self, grad_norm, *rest)
        if self.step == 7:
            self.line_values |= {"norm_of_7": grad_norm / 3, "number": 0.1, "nothing": None}

    monkeypatch.setattr(TrainState, "add_update", add_values)
    if is_mutant:
        monkeypatch.setattr(TrainState, "saved_fields", lambda self: saved_fields(self) | {"line_values": {}})
    flags = recipe(tiny, logging_steps=10, save_steps=8)
    straight = kit.run_training(2, tmp_path / "straight", *flags)
    train_until_killed(9, 2, tmp_path / "killed", *flags)
    resumed = kit.run_training(2, tmp_path / "killed", *flags)
    first, last = straight.kind("train")
    assert (first["step"], first["number"], first["nothing"]) == (10, 0.1, None)
    assert first["norm_of_7"] > 0
    assert "number" not in last
    assert (kit.timeless(resumed.folder) == kit.timeless(straight.folder)) != is_mutant


@pytest.mark.parametrize(
    "greater, values, stale",
    [(False, [3, 2, 2, None, float("nan"), 1], 0), (False, [1, 2, 1], 2), (True, [1, 2, 1], 1), (True, [None], 1)],
)
def test_update_best(greater, values, stale):
    run = RunConfig(metric_for_best_model="loss", greater_is_better=greater)
    progress = TrainState()
    for at, value in enumerate(values, start=1):
        progress.step = at
        progress.update_best({"loss": value, "weight": 1.0}, run)
    assert progress.best_step == (values.index(progress.best) + 1 if progress.best is not None else 0)
    assert (progress.evaluated, progress.evals_without_improvement) == (len(values), stale)


@pytest.mark.parametrize(
    "metric, given, expected",
    [(None, None, ("loss", False)), ("eval_f1", None, ("f1", True)), ("loss", True, ("loss", True))],
)
def test_metric_direction(metric, given, expected):
    assert best_by(RunConfig(metric_for_best_model=metric, greater_is_better=given)) == expected


def test_another_metric_starts_the_comparison_over():
    progress = TrainState(step=1)
    progress.update_best({"loss": 1.0}, RunConfig())
    progress.step = 2
    progress.update_best({"loss": 4.0}, RunConfig(greater_is_better=True, metric_for_best_model="loss"))
    assert (progress.best_step, progress.evals_without_improvement) == (2, 0)
