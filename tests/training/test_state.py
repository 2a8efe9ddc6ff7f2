"""What is not finite changes nothing on any rank, is counted and named; and a run ends early on all ranks alike."""

import inspect
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from src.checkpointing.checkpoint_folder import read_state
from src.config.parsing import RunConfig
from src.config.schema import best_by
from src.tasks import causal_lm
from src.training import evaluation, meter
from src.training.train_state import TrainState
from tests.helpers import killing, kit

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
    parameter = model.get_input_embeddings().weight

    def spoil(gradient):
        handle.remove()
        gradient = gradient.clone()
        gradient[3, 3] = float("nan")
        return gradient

    handle = parameter.register_hook(spoil)
    return loss


FAULTS = [infinite_with_a_finite_gradient, one_gradient_not_a_number]


def poison(monkeypatch, fault, steps, rank=lambda world: world - 1) -> None:
    """Apply `fault` to the loss of the first micro-batch of one rank's batch in these steps; write down its examples."""
    gradient, loss, armed = train.compute_gradient, causal_lm.Task.loss, [False]

    def noting(backend, module, batch, *rest):
        micro = batch[0][0]
        if micro.step + 1 in steps and backend.accelerator.process_index == rank(backend.accelerator.num_processes):
            armed[0] = True
            Path(os.environ["NOTES"], f"{micro.step + 1}.json").write_text(json.dumps(micro.ids.tolist()))
        return gradient(backend, module, batch, *rest)

    def poisoned(self, model, inputs):
        sums = loss(self, model, inputs)
        if armed[0] and model.training:
            armed[0] = False
            sums = sums | {"loss": fault(sums["loss"], model)}
        return sums

    monkeypatch.setattr(train, "compute_gradient", noting)
    monkeypatch.setattr(causal_lm.Task, "loss", poisoned)


def trained(world: int, folder: Path, flags: list[str]) -> kit.Run:
    return kit.run_training(world, folder, *flags, env={"NOTES": str(folder.parent)})


def saved(folder: Path, at: int) -> dict[str, torch.Tensor]:
    """Return weights, moments and step counts of a checkpoint."""
    names = ("model.safetensors", "optimizer.safetensors")
    return {
        f"{name}/{k}": v for name in names for k, v in load_file(folder / f"checkpoints/step_{at:08d}/{name}").items()
    }


def check_skipped(run: kit.Run, wrong: list[int]) -> None:
    """Assert that the steps of `wrong` changed nothing and were counted, and that every other step did what it does."""
    lines = {line["step"]: line for line in run.kind("train")}
    assert sorted(lines) == list(range(1, STEPS + 1))
    for at in range(2, STEPS + 1):
        assert kit.same(saved(run.folder, at - 1), saved(run.folder, at)) == (at in wrong)
        assert lines[at]["skipped"] == sum(w <= at for w in wrong)
        state = read_state(run.folder / f"checkpoints/step_{at:08d}")["progress"]
        assert state["updates"] == at - lines[at]["skipped"]
        # The schedule goes by updates: a skipped step uses its rate again.
        assert lines[at]["learning_rate"] == pytest.approx(3e-3 * (1 - (at - 1 - lines[at - 1]["skipped"]) / STEPS))
    assert all(tensor.isfinite().all() for tensor in run.weights.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_non_finite_update_is_skipped_on_all_ranks(tiny, tmp_path, monkeypatch, fault):
    """On 1 and 3 processes, on the last rank alone; and the run comes to the same on both."""
    poison(monkeypatch, fault, {5})
    runs = {world: trained(world, tmp_path / f"{world}", recipe(tiny)) for world in (1, 3)}
    for world, run in runs.items():
        check_skipped(run, [5])
        assert kit.distance(run.weights, runs[1].weights) <= 1e-10
        ids = json.loads((tmp_path / "5.json").read_text())  # of the last run: its rank 2 has another micro-batch
        said = (tmp_path / f"{world}.out" / f"rank{world - 1}.txt").read_text()
        log = (run.folder / "logs" / f"rank_{world - 1}.log").read_text()
        if fault is one_gradient_not_a_number:
            assert "step 5: the gradient (here, of examples [" in log
            assert "the gradient (here" in (tmp_path / f"{world}.out" / "rank0.txt").read_text()
        else:
            assert [line["loss"] is None for line in run.kind("train")] == [at == 5 for at in range(1, STEPS + 1)]
            if world == 3:
                assert f"warning: rank 2, step 5: the loss of examples {ids} is not finite" in said
            assert re.search(
                rf"warning: rank {world - 1}, step 5: the loss of examples \[\d+, \d+\] is not finite", said
            )
            assert "step 5: the loss of examples" in log


def test_first_update_may_be_skipped(tiny, tmp_path, monkeypatch):
    """When there are no moments yet. Everything after is as if a run of other data had begun one step later."""
    with monkeypatch.context() as patch:
        poison(patch, not_a_number, {1, 4})
        runs = {world: trained(world, tmp_path / f"{world}", recipe(tiny, optim="sgd")) for world in (1, 2)}
    for run in runs.values():
        check_skipped(run, [1, 4])
    assert kit.distance(runs[1].weights, runs[2].weights) <= 1e-10

    # The same steps without their global batches: no update is attempted where the weight of a step is zero.
    counts = meter.batch_counts
    monkeypatch.setattr(
        meter,
        "batch_counts",
        lambda batch: [0.0] * 3 + counts(batch)[3:] if batch[0][0].step in (0, 3) else counts(batch),
    )
    assert kit.same(trained(1, tmp_path / "skipped", recipe(tiny, optim="sgd")).weights, runs[1].weights)


def test_mutant_without_skipping_is_caught(tiny, tmp_path, monkeypatch):
    poison(monkeypatch, not_a_number, {5})
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones_like(tensor, dtype=torch.bool))
    run = trained(1, tmp_path / "run", recipe(tiny))
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_skipped(run, [5])
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
    run = trained(2, tmp_path / "run", recipe(tiny))
    with pytest.raises(AssertionError):
        check_skipped(run, [5])


# ---- too often in a row --------------------------------------------------------------------------------------------------


def test_max_skipped_steps_in_a_row_end_all_ranks(tiny, tmp_path, monkeypatch):
    """Steps 2 and 3, then a finite one, then 5, 6, 7: the third in a row, over a stop in between that keeps the count."""
    poison(monkeypatch, not_a_number, {2, 3, 5, 6, 7, 8, 9})
    flags = recipe(tiny, max_skipped_steps=3)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(kit.RankFailed):
        killing.die_at(7, patch)  # after step 6, the second in a row
        trained(2, tmp_path / "run", flags)
    newest = max((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert (newest.name, read_state(newest)["progress"]["skipped"]) == ("step_00000006", 2)

    argv, env = [*flags, "--output_dir", tmp_path / "run"], {"NOTES": str(tmp_path)}
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=2, env=env)
    assert codes == [1, 1], texts
    said = "3 updates in a row were skipped because the loss or the gradient was not finite, the last at step 7"
    assert said in "".join(texts)
    assert "Traceback" not in "".join(texts)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["exit_code"]) == ("failed", 1)
    assert said in status["reason"]


# ---- early stopping ------------------------------------------------------------------------------------------------------


def standing(tiny, **fields) -> list[str]:
    """A run that learns nothing: the first evaluation is the best, so patience 2 ends it with the third, at step 9."""
    early = {"early_stopping_patience": 2, "eval_steps": 3, "save_steps": 4, "learning_rate": 0.0, "max_steps": 40}
    return recipe(tiny, **early | fields)


@pytest.fixture(scope="module")
def early(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    return kit.run_training(2, folder / "run", *standing(tiny))


def test_early_stopping_ends_all_ranks_at_one_step(tiny, early, tmp_path):
    run = early
    assert [line["step"] for line in run.kind("eval")] == [3, 6, 9]
    assert [line["step"] for line in run.kind("train")] == list(range(1, 10))
    assert (run.folder / "checkpoints" / "step_00000009").is_dir()
    assert kit.same(run.weights, load_file(run.folder / "checkpoints/step_00000009/model.safetensors"))
    status = json.loads((run.folder / "status.json").read_text())
    assert (status["status"], status["step"], status["exit_code"]) == ("complete", 9, 0)

    files = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file() and path.suffix != ".log"}
    again = kit.Ranks("train.py", *standing(tiny), "--output_dir", run.folder, folder=tmp_path / "here", world=2)
    assert again.wait() == [0, 0], again.text()
    assert "nothing is left to train" in again.text()
    after = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file() and path.suffix != ".log"}
    assert {p.name for p in files.keys() ^ after.keys()} == set()
    assert {p.name for p in files if files[p] != after[p]} <= {"status.json"}


def test_unknown_metric_names_the_known_ones(tiny, tmp_path):
    flags = standing(tiny, metric_for_best_model="acuracy", save_steps=3)
    codes, texts = kit.run_command("train.py", *flags, "--output_dir", "run", folder=tmp_path / "here", world=2)
    assert codes == [2, 2], texts
    said = "".join(texts)
    assert "metric_for_best_model: an evaluation has no 'acuracy'; did you mean accuracy?" in said
    assert "it has loss, weight, examples, perplexity, accuracy" in said


# ---- what is due, in small -----------------------------------------------------------------------------------------------


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
    known = [value for value in values if value is not None]
    assert progress.best == ((max if greater else min)(known) if known else None)


@pytest.mark.parametrize(
    "metric, given, expected",
    [
        (None, None, ("loss", False)),
        ("eval_loss", None, ("loss", False)),
        ("eval_f1", None, ("f1", True)),
        ("perplexity", None, ("perplexity", True)),
        ("loss", True, ("loss", True)),
    ],
)
def test_metric_direction(metric, given, expected):
    run = RunConfig(metric_for_best_model=metric, greater_is_better=given)
    assert best_by(run) == expected


@pytest.mark.parametrize("change", [{"metric_for_best_model": "f1"}, {"greater_is_better": True}])
def test_another_metric_starts_the_comparison_over(change):
    run, progress = RunConfig(metric_for_best_model="loss"), TrainState()
    for progress.step in (1, 2, 3):
        progress.update_best({"loss": float(progress.step)}, run)
    assert (progress.best, progress.best_step, progress.evals_without_improvement) == (1.0, 1, 2)
    progress.step = 4
    progress.update_best({"loss": 4.0, "f1": 0.5}, RunConfig(**{"metric_for_best_model": "loss"} | change))
    assert (progress.best_step, progress.evals_without_improvement) == (4, 0)
    assert progress.best == (0.5 if "metric_for_best_model" in change else 4.0)


def test_run_without_any_update_fails(tiny, tmp_path, monkeypatch):
    """Fewer steps than max_skipped_steps, all with a loss that is not a number."""
    loss = causal_lm.Task.loss

    def no_number(task, model, inputs):
        sums = loss(task, model, inputs)
        return sums | {"loss": sums["loss"] * float("nan")} if model.training else sums

    monkeypatch.setattr(causal_lm.Task, "loss", no_number)
    codes, texts = kit.run_command("train.py", *recipe(tiny, output_dir="run"), folder=tmp_path, world=2)
    assert codes == [1, 1], texts
    assert f"all {STEPS} updates were skipped" in "".join(texts)
    assert not (tmp_path / "run" / "final").exists()


# ---- metrics that are not finite -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [False, True])
def test_metric_that_is_not_finite(tiny, tmp_path, monkeypatch, stops):
    """The evaluation of step 8: by default a warning; with stop_on_nan_metric all ranks save and end with 1."""
    loss, evaluations = causal_lm.Task.loss, []

    def poisoned(self, model, inputs):
        sums = loss(self, model, inputs)
        return sums if model.training or len(evaluations) != 2 else sums | {"loss": sums["loss"] * float("nan")}

    evaluate = evaluation.evaluate
    monkeypatch.setattr(causal_lm.Task, "loss", poisoned)
    monkeypatch.setattr(evaluation, "evaluate", lambda *args: (evaluations.append(1), evaluate(*args))[1])
    flags = recipe(tiny, eval_steps=4, save_steps=100, stop_on_nan_metric=stops, max_eval_examples=8)
    codes, texts = kit.run_command(
        "train.py", *flags, "--output_dir", tmp_path / "run", folder=tmp_path / "cwd", world=2
    )
    assert codes == [int(stops)] * 2
    assert "step 8: loss is nan" in "".join(texts)
    assert "warning: evaluation at step 8" in texts[0] or stops
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [
        f"step_000000{8 if stops else 12:02d}"
    ]
