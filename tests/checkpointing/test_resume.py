"""A run resumes from the newest checkpoint that verifies, or refuses with the reason; init_from; the cost of resuming."""

import json
import shutil

import numpy as np
import pytest
from accelerate import Accelerator

import train
from src.checkpointing.locate_weights import init_weights
from src.config.errors import UsageError
from src.config.parsing import RunConfig
from src.distributed.backends import make_backend
from src.storage import atomic_folder
from tests.checkpointing import recipe
from tests.checkpointing.recipe import DAMAGE, at_step, find, identity_of
from tests.checkpointing.test_format import FILES
from tests.helpers import kit


@pytest.fixture(scope="module")
def known(tiny) -> dict:
    return identity_of(recipe.flags(tiny))


def test_resume_from_what_is_no_checkpoint(tiny, known, interrupted):
    with pytest.raises(UsageError, match="resume: nowhere is neither a checkpoint nor a run with one"):
        find(interrupted(), recipe.flags(tiny, resume="nowhere"), known)


def _addresses(tiny: dict, folder) -> list[set[int]]:
    """Return how far weights of a checkpoint begin after a multiple of 64 bytes: as the backend and as the task builds them."""
    backend = make_backend(Accelerator(cpu=True), RunConfig())
    task, _ = kit.open_data(**tiny)
    models = (backend.build_model(task, folder), task.build_model(folder))
    return [{p.data_ptr() % 64 for p in model.parameters()} for model in models]


def test_loaded_weights_begin_where_those_of_a_new_run_do(tiny, straight, tmp_path):
    """Elsewhere kernels of a CPU round differently, and after hundreds of steps the losses of a resumed run would differ.

    The mutant uses weights where transformers has mapped the file into memory."""
    folder = straight[1].folder / at_step(8)
    [(ours, mutant)] = kit.spawn(1, _addresses, tiny, folder, out=tmp_path / "out")
    assert ours == {0}
    assert mutant != {0}


# ---- damage: every file of the newest checkpoint, in every way ---------------------------------------------------------


def not_found(folder, argv: list, known: dict) -> list[str]:
    """Return the damages to the newest checkpoint after which the run would not resume from the older one with a note that
    names the file."""
    newest, missed = folder / at_step(8), []
    for path in sorted(newest.iterdir()):
        for how, damage in DAMAGE.items():
            data = path.read_bytes()
            damage(path)
            try:
                checkpoint, notes = find(folder, argv, known)
                note = f"{newest} is damaged and not used: {path.name}"
                if checkpoint.name != "step_00000004" or not any(note in text for text in notes):
                    missed.append(f"{path.name} {how}")
            except Exception as error:
                missed.append(f"{path.name} {how}: {type(error).__name__}")
            path.write_bytes(data)
    return missed


def test_every_damage_to_every_file_is_found(tiny, known, interrupted):
    folder, argv = interrupted(), recipe.flags(tiny)
    assert find(folder, argv, known) == (folder / at_step(8), [])
    assert not_found(folder, argv, known) == []
    assert find(folder, argv, known) == (folder / at_step(8), [])


def test_mutant_that_does_not_verify_misses_every_damage(tiny, known, interrupted, monkeypatch):
    monkeypatch.setattr(atomic_folder, "verify", lambda folder: [])
    missed = not_found(interrupted(), recipe.flags(tiny), known)
    assert len(missed) == len(FILES) * len(DAMAGE)
    assert "model.safetensors middle bit flipped" in missed


@pytest.mark.parametrize(
    "world, name, how",
    [
        (2, "optimizer.safetensors", "last byte cut off"),
        (1, "manifest.json", "removed"),
    ],
)
def test_fallback_to_the_older_checkpoint_is_bitwise_exact(tiny, straight, interrupted, world, name, how):
    folder = interrupted(world)
    DAMAGE[how](folder / at_step(8) / name)
    run = kit.run_training(world, folder, *recipe.flags(tiny))
    said = (folder.with_suffix(".out") / "rank0.txt").read_text()
    assert f"step_00000008 is damaged and not used: {name}" in said
    assert "step_00000004" in said
    assert recipe.same_run(run, straight[world])
    assert (folder / "checkpoints" / "old_step_00000008.old1").is_dir()  # kept


def test_all_damaged_ends_all_ranks_with_2_and_changes_nothing(tiny, interrupted, tmp_path):
    folder = interrupted()
    DAMAGE["middle bit flipped"](folder / at_step(4) / "model.safetensors")
    DAMAGE["middle bit flipped"](folder / at_step(8) / "state.json")
    before = recipe.contents(folder)
    codes, outputs = recipe.command(recipe.flags(tiny), tmp_path, world=2)
    assert codes == [2, 2], outputs
    last = outputs[0].rstrip().splitlines()[-1]
    assert "step_00000004 is damaged and not used: model.safetensors: its hash" in last
    assert "step_00000008 is damaged and not used: state.json: its hash" in last
    assert "--resume never" in last
    assert recipe.contents(folder) == before


def test_mutant_run_that_does_not_verify_ends_with_other_weights(tiny, straight, interrupted, monkeypatch):
    folder = interrupted()
    path = folder / at_step(8) / "model.safetensors"
    recipe.flip(path, 8 * (path.stat().st_size - 1) + 6)  # an exponent bit of the last weight
    monkeypatch.setattr(atomic_folder, "verify", lambda folder: [])
    assert not kit.same(kit.run_training(1, folder, *recipe.flags(tiny)).weights, straight[1].weights)


# ---- a new run from old weights ----------------------------------------------------------------------------------------


def _weights_at_the_start(argv):
    """Train on this rank; return the model's weights before the first step."""
    seen = {}

    def look(backend, module, optimizer):
        seen["weights"] = {name: value.clone() for name, value in module.model.state_dict().items()}

    kit.after_prepare(look)
    train.main([str(word) for word in argv])
    return seen["weights"]


def test_init_from_begins_a_new_run_with_old_weights(tiny, straight, tmp_path):
    source = straight[1].folder / at_step(8)
    flags = recipe.flags(tiny, init_from=source, max_steps=2, seed=5, output_dir=tmp_path / "run")
    [weights] = kit.spawn(1, _weights_at_the_start, flags, out=tmp_path / "out")
    stored = kit.load_weights(source)
    assert stored.keys() <= weights.keys()  # tied ones are stored once
    assert all(kit.torch.equal(weights[name], stored[name]) for name in stored)
    # A new run: its moments begin at zero, its order with its own seed.
    moments = kit.load_weights(tmp_path / "run" / at_step(2), "optimizer")
    assert moments["step/transformer.wte.weight"] == 2
    plan = json.loads(kit.ledger_text(tmp_path / "run").splitlines()[0])["plan"]
    assert plan["seed"] == 5


def test_init_from_an_unfinished_run_takes_its_newest_intact_checkpoint(interrupted):
    folder = interrupted()
    cfg = RunConfig(init_from=str(folder))
    assert init_weights(cfg) == folder / at_step(8)
    DAMAGE["last bit flipped"](folder / at_step(8) / "model.safetensors")
    assert init_weights(cfg) == folder / at_step(4)
    DAMAGE["removed"](folder / at_step(4) / "config.json")
    with pytest.raises(UsageError, match=r"init_from: .* neither a checkpoint nor a run with an intact checkpoint"):
        init_weights(cfg)


@pytest.mark.parametrize("what", ["checkpoints/step_00000008", ""])
def test_init_from_verifies_every_file(straight, tmp_path, what):
    run = shutil.copytree(straight[1].folder, tmp_path / "run")
    cfg, folder = RunConfig(init_from=str(run / what)), run / (what or "final")
    assert init_weights(cfg) == folder
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        DAMAGE["last bit flipped"](path)
        with pytest.raises(UsageError, match=f"init_from: {folder} is damaged: {path.name}"):
            init_weights(cfg)
        path.write_bytes(data)


# ---- O(1) --------------------------------------------------------------------------------------------------------------


def _rows_read(argv, replay: bool = False):
    """Train on this rank; return the ids of all rows that were read, in order, and those trained on.

    With `replay` as skip_first_batches does: all is read from the start, and thrown away."""
    from src.data import data_loader
    from src.data.prepared_split import Split

    read, trained, rows, gradient, order = [], [], Split.rows, train.compute_gradient, data_loader.training_order

    def spy(self, ids):
        read.extend(np.asarray(ids).tolist())
        return rows(self, ids)

    def seen(*args):
        [batch] = [arg for arg in args if isinstance(arg, list)]
        trained.extend(i for micro, _ in batch for i in micro.ids.tolist())
        return gradient(*args)

    Split.rows, train.compute_gradient = spy, seen
    if replay:
        first = [0]

        def from_start(config, rank, world, start, stop):
            first[0] = start
            return order(config, rank, world, 0, stop)

        def skip(batches, original=data_loader.group_by_step):
            return (item for n, item in enumerate(original(batches)) if n >= first[0])

        data_loader.group_by_step, data_loader.training_order = skip, from_start
    train.main([str(word) for word in argv])
    return read, trained


@pytest.mark.parametrize("replay", [False, True])
def test_resumed_run_reads_only_what_it_trains_on(tiny, interrupted, tmp_path, replay):
    folder = interrupted()
    argv = recipe.flags(tiny, output_dir=folder, validation_file=None)
    [(read, trained)] = kit.spawn(1, _rows_read, argv, replay, out=tmp_path / "out")
    assert len(trained) == 2 * 8 + 3 + 8  # steps 9 and 10, the tail of the epoch, step 12
    if replay:  # the mutant
        assert len(read) == len(trained) + 8 * 8
    else:
        assert read == trained
