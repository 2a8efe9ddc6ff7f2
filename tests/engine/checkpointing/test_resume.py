"""A run resumes from the newest checkpoint that verifies, or refuses with the reason; init_from; the cost of resuming."""

import json
import shutil

import numpy as np
import pytest
from accelerate import Accelerator

import train
from engine.checkpointing.locate_weights import init_weights
from engine.config.errors import UsageError
from engine.config.parsing import RunConfig
from engine.distributed.choose_backend import make_backend
from engine.storage import verify_hashes
from tests.engine.checkpointing import recipe
from tests.engine.checkpointing.recipe import DAMAGE
from tests.engine.checkpointing.test_format import FILES
from tests.helpers import kit
from tests.helpers.backend_runs import at_step


def _addresses(tiny: dict, folder) -> list[set[int]]:
    """Return how far weights of a checkpoint begin after a multiple of 64 bytes: as the backend and as the task builds them."""
    backend = make_backend(Accelerator(cpu=True), RunConfig())
    task, _ = kit.open_data(**tiny)
    models = (backend.build_model(task, folder), task.build_model(folder))
    return [{p.data_ptr() % 64 for p in model.parameters()} for model in models]


def test_loaded_weights_begin_where_those_of_a_new_run_do(tiny, straight, tmp_path):
    """Elsewhere kernels of a CPU round differently, and after hundreds of steps the losses of a resumed run would differ.

    The mutant uses weights where transformers has mapped the file into memory."""
    [(ours, mutant)] = kit.spawn(1, _addresses, tiny, at_step(straight[1], 8), out=tmp_path / "out")
    assert ours == {0}
    assert mutant != {0}


# ---- damage: every file of the newest checkpoint, in every way ---------------------------------------------------------


@pytest.mark.parametrize("mutant", [False, True])
def test_every_damage_to_every_file_is_found(tiny, interrupted, monkeypatch, mutant):
    """The run resumes from the older checkpoint, with a note that names the file. The mutant does not verify."""
    if mutant:
        monkeypatch.setattr(verify_hashes, "verify", lambda folder: [])
    folder = interrupted()
    newest, missed, find = at_step(folder, 8), [], recipe.finder(folder, tiny)
    for path in sorted(newest.iterdir()):
        for how, damage in DAMAGE.items():
            data = path.read_bytes()
            damage(path)
            try:
                checkpoint, notes = find()
                note = f"{newest} is damaged and not used: {path.name}"
                if checkpoint.name != "step_00000004" or not any(note in text for text in notes):
                    missed.append(f"{path.name} {how}")
            except Exception as error:
                missed.append(f"{path.name} {how}: {type(error).__name__}")
            path.write_bytes(data)
    assert len(missed) == (len(FILES) * len(DAMAGE) if mutant else 0), missed
    assert find() == (newest, [])


@pytest.mark.parametrize("world, mutant", [(2, False), (1, True)])
def test_fallback_to_the_older_checkpoint_is_bitwise_exact(tiny, straight, interrupted, monkeypatch, world, mutant):
    """The mutant does not verify, and ends with other weights."""
    folder = interrupted(world)
    path = at_step(folder, 8) / "model.safetensors"
    recipe.flip(path, 8 * (path.stat().st_size - 1) + 6)  # an exponent bit of the last weight
    if mutant:
        monkeypatch.setattr(verify_hashes, "verify", lambda folder: [])
    run = kit.run_training(world, folder, *recipe.flags(tiny))
    assert recipe.same_run(run, straight[world]) == (not mutant)
    assert kit.same(run.weights, straight[world].weights) == (not mutant)
    if not mutant:
        said = (folder.with_suffix(".out") / "rank0.txt").read_text()
        assert "step_00000008 is damaged and not used: model.safetensors" in said
        assert (folder / "checkpoints" / "old_step_00000008.old1").is_dir()  # kept


@pytest.mark.parametrize(
    "how, file, text",
    [
        ("middle bit flipped", "state.json", "state.json: its hash"),
        ("removed", "manifest.json", "manifest.json is missing"),
    ],
)
def test_all_damaged_ends_all_ranks_with_2_and_changes_nothing(tiny, interrupted, tmp_path, how, file, text):
    """Also a renamed one, which would else be no checkpoint, and the run begin again from nothing."""
    folder = interrupted()
    DAMAGE["middle bit flipped"](at_step(folder, 4) / "model.safetensors")
    DAMAGE[how](at_step(folder, 8).rename(folder / "checkpoints" / "good") / file)
    before = recipe.contents(folder)
    codes, outputs = recipe.command(recipe.flags(tiny), tmp_path, world=2)
    assert codes == [2, 2], outputs
    last = outputs[0].rstrip().splitlines()[-1]
    assert "step_00000004 is damaged and not used: model.safetensors: its hash" in last
    assert f"good is damaged and not used: {text}" in last
    assert recipe.contents(folder) == before


def test_damaged_checkpoint_that_is_asked_for_is_named(tiny, interrupted):
    """Without its id it is still of the run in whose folder it is."""
    folder = interrupted()
    DAMAGE["last byte cut off"](at_step(folder, 8) / "state.json")
    with pytest.raises(UsageError, match=r"no checkpoint is intact: .*step_00000008 is damaged and .*: state.json"):
        recipe.finder(folder, tiny, resume=at_step(folder, 8))()
    shutil.rmtree(at_step(folder, 4))
    with pytest.raises(UsageError, match=r"no checkpoint is intact: .*step_00000008 is damaged and .*: state.json"):
        recipe.finder(folder, tiny, resume=folder)()


# ---- a new run from old weights ----------------------------------------------------------------------------------------


def test_init_from_begins_a_new_run_with_old_weights(tiny, straight, tmp_path):
    """With a rate of zero they stay. Its moments begin at zero, its order with its own seed."""
    source = at_step(straight[1], 8)
    flags = recipe.flags(tiny, init_from=source, max_steps=2, seed=5, learning_rate=0.0)
    run = kit.run_training(1, tmp_path / "run", *flags)
    assert kit.same(run.weights, kit.load_weights(source))
    assert kit.load_weights(at_step(run, 2), "optimizer")["step/transformer.wte.weight"] == 2
    assert json.loads(kit.ledger_text(run.folder).splitlines()[0])["plan"]["seed"] == 5


def test_init_from_takes_final_or_the_newest_intact_checkpoint_of_a_run(straight, interrupted, tmp_path, capsys):
    done = shutil.copytree(straight[1].folder, tmp_path / "done")
    assert init_weights(RunConfig(init_from=str(done))) == done / "final"
    for asked, path in ((done, done / "final"), (at_step(done, 8), at_step(done, 8))):
        DAMAGE["last byte cut off"](path / "model.safetensors")
        with pytest.raises(UsageError, match=f"init_from: {path} is damaged: model.safetensors"):
            init_weights(RunConfig(init_from=str(asked)))
    DAMAGE["removed"](done / "final" / "config.json")  # not the newest checkpoint, which may not be the best one
    with pytest.raises(UsageError, match=r"init_from: .*final is damaged: config.json"):
        init_weights(RunConfig(init_from=str(done)))
    folder = interrupted()
    cfg = RunConfig(init_from=str(folder))
    assert init_weights(cfg) == at_step(folder, 8)
    DAMAGE["middle bit flipped"](at_step(folder, 8) / "model.safetensors")
    assert init_weights(cfg) == at_step(folder, 4)
    assert "step_00000008 is damaged and not used: model.safetensors" in capsys.readouterr().err
    DAMAGE["removed"](at_step(folder, 4) / "config.json")
    with pytest.raises(UsageError, match=r"init_from: .* neither a checkpoint nor a run with an intact checkpoint"):
        init_weights(cfg)


# ---- O(1) --------------------------------------------------------------------------------------------------------------


def _rows_read(argv, replay: bool = False):
    """Train on this rank; return the ids of all rows that were read.

    With `replay` as skip_first_batches does: all is read from the start, and thrown away."""
    from engine.plan import data_loader
    from engine.rows.prepared_split import Split

    read, rows, order = [], Split.rows, data_loader.training_order

    def spy(self, ids):
        read.extend(np.asarray(ids).tolist())
        return rows(self, ids)

    Split.rows = spy
    if replay:
        first = [0]

        def from_start(config, rank, world, start, stop):
            first[0] = start
            return order(config, rank, world, 0, stop)

        def skip(batches, original=data_loader.group_by_step):
            return (item for n, item in enumerate(original(batches)) if n >= first[0])

        data_loader.group_by_step, data_loader.training_order = skip, from_start
    train.main([str(word) for word in argv])
    return read


@pytest.mark.parametrize("replay", [False, True])
def test_resumed_run_reads_only_what_it_trains_on(tiny, interrupted, tmp_path, replay):
    folder = interrupted()
    argv = recipe.flags(tiny, output_dir=folder, validation_file=None)
    [read] = kit.spawn(1, _rows_read, argv, replay, out=tmp_path / "out")
    trained_on = 2 * 8 + 3 + 8  # steps 9 and 10, the tail of the epoch, step 12
    assert len(read) == trained_on + (8 * 8 if replay else 0)  # replay: the mutant
