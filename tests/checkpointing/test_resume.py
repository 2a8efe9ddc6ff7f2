"""A run goes on from the newest checkpoint that verifies, of the same run, or says why not: nothing happens silently."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

import train
from src.checkpointing import checkpoint_list, resume, run_identity
from src.checkpointing import locate_weights as weights
from src.config import parsing
from src.config.errors import UsageError
from src.config.parsing import RunConfig, to_yaml
from src.storage import atomic_folder
from src.tasks import OPTIONS
from tests.helpers import kit

STEPS = 12


def recipe(files, **fields) -> list[str]:
    values = {
        "model_config": files / "gpt2.yaml",  # with dropout, and tied weights
        "train_file": files / "train.jsonl",
        "per_device_batch_size": 8,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_steps": 4,
    } | fields
    return kit.flags(**{name: value for name, value in values.items() if value is not None})


@pytest.fixture(scope="module")
def straight(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return {world: kit.run_training(world, folder / f"{world}", *recipe(files)) for world in (1, 2)}


@pytest.fixture(scope="module")
def killed(files, tmp_path_factory):
    """A run folder with intact checkpoints of steps 4 and 8, killed at step 11."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        kit.exit_in_update(11, patch)
        with pytest.raises(kit.RankFailed):
            kit.run_training(1, folder / "run", *recipe(files))
    assert [path.name for path in checkpoint_list.list_checkpoints(folder / "run")] == [
        "step_00000004",
        "step_00000008",
    ]
    return folder / "run"


@pytest.fixture
def run(killed, tmp_path):
    """A copy of that folder, to be damaged."""
    shutil.copytree(killed, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def stats(files):
    """What the data of `recipe` holds."""
    return kit.open_data(**fields_of(recipe(files)))[1]["train"].stats


def fields_of(argv: list[str]) -> dict[str, str]:
    return {name[2:]: value for name, value in zip(argv[::2], argv[1::2], strict=True)}


def find(folder: Path, stats: dict, argv: list[str]) -> resume.ResumePoint:
    """Return what the main process would go on from."""
    asked, options = parsing.parse([*argv, "--output_dir", str(folder)], OPTIONS)
    return resume.find(asked, stats, yaml.safe_load(to_yaml(asked, options)), type(options))


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_resume_from_what_is_no_checkpoint(files, killed, stats, tmp_path, monkeypatch, name):
    """In the folder of a run, too, where it is not called a checkpoint of another run."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"resume: {name} is neither a checkpoint nor a run with one"):
        find(killed, stats, recipe(files, resume=name))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- damage: every file of the newest checkpoint, in turn ------------------------------------------------------------

FILES = ["config.json", "generation_config.json", "manifest.json", "model.safetensors", "optimizer.safetensors"]
FILES += ["state.json"]


def flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGE = {
    "its first bit flipped": lambda path: flipped(path, 0),
    "a bit in the middle flipped": lambda path: flipped(path, 4 * path.stat().st_size + 3),
    "its last bit flipped": lambda path: flipped(path, 8 * path.stat().st_size - 1),
    "its last byte cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
}


def silent(folder: Path, stats: dict, argv: list[str]) -> list[str]:
    """Damage every file of the newest checkpoint in every way; return where the run would not go on from the older one
    with a note that names the file."""
    newest, missed = folder / "checkpoints" / "step_00000008", []
    for path in sorted(newest.iterdir()):
        for how, damage in DAMAGE.items():
            data = path.read_bytes()
            damage(path)
            try:
                start = find(folder, stats, argv)
                if start.folder.name != "step_00000004" or not any(
                    f"{newest} is damaged and not used: {path.name}" in note for note in start.notes
                ):
                    missed.append(f"{path.name} {how}")
            except Exception as error:
                missed.append(f"{path.name} {how}: {type(error).__name__}")
            path.write_bytes(data)
    return missed


def test_every_damage_to_every_file_is_found_and_named_and_the_older_one_is_used(files, run, stats):
    assert sorted(path.name for path in (run / "checkpoints" / "step_00000008").iterdir()) == FILES
    assert find(run, stats, recipe(files)).folder.name == "step_00000008"
    assert silent(run, stats, recipe(files)) == []
    assert find(run, stats, recipe(files)) == (run / "checkpoints" / "step_00000008", [])


def test_mutant_that_does_not_verify_resumes_silently(files, run, stats, monkeypatch):
    monkeypatch.setattr(atomic_folder, "verify", lambda folder: [])
    missed = silent(run, stats, recipe(files))
    assert len(missed) == len(FILES) * len(DAMAGE)
    assert "model.safetensors a bit in the middle flipped" in missed


def test_every_damage_to_a_checkpoint_that_is_asked_for_is_refused_by_name(files, run, stats, tmp_path):
    asked = run / "checkpoints" / "step_00000008"
    for path in sorted(asked.iterdir()):
        for damage in DAMAGE.values():
            data = path.read_bytes()
            damage(path)
            with pytest.raises(UsageError) as refused:
                find(tmp_path / "other", stats, [*recipe(files), "--resume", str(asked)])
            assert str(refused.value).startswith(f"resume: {asked}")
            # Without state.json it does not look like a checkpoint at all.
            assert path.name in str(refused.value) or not (asked / "state.json").exists()
            path.write_bytes(data)
    assert find(tmp_path / "other", stats, [*recipe(files), "--resume", str(asked)]).folder == asked


def test_all_damaged_is_a_refusal_that_names_every_one(files, run, stats):
    for number, name in ((4, "model.safetensors"), (8, "state.json")):
        flipped(run / f"checkpoints/step_{number:08d}/{name}", 99)
    with pytest.raises(UsageError) as refused:
        find(run, stats, recipe(files))
    assert "none of the checkpoints is intact" in str(refused.value)
    assert "step_00000004 is damaged and not used: model.safetensors: its hash" in str(refused.value)
    assert "step_00000008 is damaged and not used: state.json: its hash" in str(refused.value)
    assert "--resume never" in str(refused.value)


def damage(run: Path, name: str, how: str, step: int = 8) -> None:
    DAMAGE[how](run / f"checkpoints/step_{step:08d}" / name)


@pytest.mark.parametrize(
    "world, name, how",
    [
        (1, "model.safetensors", "a bit in the middle flipped"),
        (2, "optimizer.safetensors", "its last byte cut off"),
        (1, "manifest.json", "removed"),
    ],
)
def test_a_run_that_falls_back_ends_bitwise_as_if_undisturbed(files, straight, tmp_path, killed, world, name, how):
    """Bitwise on the same number of processes, so the run on two was killed on two."""
    folder = tmp_path / "run"
    if world == 1:
        shutil.copytree(killed, folder)
    else:
        with pytest.MonkeyPatch.context() as patch:
            kit.exit_in_update(11, patch)
            with pytest.raises(kit.RankFailed):
                kit.run_training(world, folder, *recipe(files))
    damage(folder, name, how)
    run = kit.run_training(world, folder, *recipe(files))
    said = (tmp_path / "run.out" / "rank0.txt").read_text()
    assert f"step_00000008 is damaged and not used: {name}" in said
    assert "going on from" in said
    assert "step_00000004, step 4" in said
    assert kit.same(run.weights, straight[world].weights)
    optimizers = [
        load_file(r.folder / f"checkpoints/step_{STEPS:08d}/optimizer.safetensors") for r in (run, straight[world])
    ]
    assert kit.same(*optimizers)
    assert [line["step"] for line in run.kind("train")] == list(range(1, STEPS + 1))
    assert run.losses() == straight[world].losses()
    # The damaged one is kept beside the new ones, for who wants to look at it.
    assert (folder / "checkpoints" / "old_step_00000008.old1").is_dir()


@pytest.mark.parametrize("world", [1, 2])
def test_when_nothing_is_intact_all_ranks_end_with_2_and_nothing_changes(files, run, tmp_path, world):
    for step in (4, 8):
        damage(run, "model.safetensors", "a bit in the middle flipped", step)
    before = contents(run)
    codes, outputs = kit.run_command("train.py", *recipe(files), "--output_dir", "run", folder=tmp_path, world=world)
    assert codes == [2] * world, outputs
    last = outputs[0].rstrip().splitlines()[-1]
    assert "none of the checkpoints is intact" in last
    assert "step_00000004 is damaged and not used: model.safetensors" in last
    assert "step_00000008 is damaged and not used: model.safetensors" in last
    assert contents(run) == before


def test_a_damaged_checkpoint_that_is_asked_for_is_refused_with_2(files, run, tmp_path):
    damage(run, "model.safetensors", "its last bit flipped")
    before = contents(run)
    asked = [*recipe(files), "--resume", "run/checkpoints/step_00000008", "--output_dir", "other"]
    codes, outputs = kit.run_command("train.py", *asked, folder=tmp_path, world=2)
    assert codes == [2, 2], outputs
    assert "run/checkpoints/step_00000008 is damaged: model.safetensors: its hash is not" in outputs[0]
    assert contents(run) == before
    assert not (tmp_path / "other").exists()


def test_mutant_run_that_does_not_verify_ends_with_other_weights(files, straight, run, monkeypatch):
    path = run / "checkpoints" / "step_00000008" / "model.safetensors"
    flipped(path, 8 * (path.stat().st_size - 1) + 6)  # an exponent bit of the last weight
    monkeypatch.setattr(atomic_folder, "verify", lambda folder: [])
    assert not kit.same(kit.run_training(1, run, *recipe(files)).weights, straight[1].weights)


# ---- a changed mind: field by field ----------------------------------------------------------------------------------

# Another value for every field that may change when a run goes on ...
FREE = {
    "output_dir": None,  # looked at below: it is where the checkpoint is sought
    "resume": None,  # likewise
    "dry_run": True,
    "model_config": None,  # by content, below
    "tokenizer_name": "somewhere/else",  # by the rows that it makes, below
    "attn_implementation": "eager",
    "trust_remote_code": True,
    "dataset_name": "somewhere/else",  # all data by content, below
    "dataset_config_name": "other",
    "dataset_revision": "v2",
    "train_file": "elsewhere.jsonl",
    "validation_file": "other.jsonl",
    "dataloader_num_workers": 2,
    "dataloader_timeout": 60,
    "preprocessing_num_workers": 2,
    "cache_dir": "/tmp",
    "cache_per_node": True,
    "mixture": None,  # by content: tests/data/test_mixture.py
    "per_device_batch_tokens": 100,
    "per_device_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "sync_each_batch": True,
    "gradient_checkpointing": True,
    "compile": True,
    "tf32": True,
    "ddp_comm_hook": "fp16",
    "max_steps": None,  # by its schedule, below
    "num_train_epochs": 2.5,  # max_steps wins
    "logging_steps": 2,
    "eval_steps": 3,
    "save_steps": 2,
    "save_total_limit": 5,
    "save_keep_every": 10,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "early_stopping_patience": 4,
    "max_skipped_steps": 3,
    "max_failed_saves": 5,
    "drift_check_steps": 2,
    "time_limit": 60.0,
    "project": "other",
    "run_name": "other",
    "report_to": "none",
    "push_to_hub": True,
    "hub_model_id": "somebody/model",
    "ddp_timeout": 100,
    "sample_prompt": "def",
    "sample_tokens": 10,
    "metrics": "none",
}
# ... and for every one that would make another run of it.
MATHEMATICS = {
    "max_eval_examples": 50,
    "pad_to_multiple_of": 8,
    "task": "text_classification",
    "seed": 7,
    "streaming": True,
    "stream_lanes": 2,
    "model_name_or_path": "some/model",
    "model_revision": "v2",
    "init_from": "some/run",
    "dtype": "float64",
    "global_batch_size": 16,
    "optim": "sgd",
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.5,
    "local_sgd_steps": 4,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": '{"num_cycles": 2}',
    "warmup_steps": 5.0,
    "max_length": 64,
    "packing": True,
    "text_column": "other",
    "append_eos": False,
    "chat_template": "other.jinja",
    "text_pair_column": "other",
    "label_column": "other",
}


def names_of(kind) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_every_field_is_known_here_as_free_or_as_mathematics():
    every = names_of(RunConfig).union(*(names_of(options()) for options in OPTIONS.values()))
    assert FREE.keys() | MATHEMATICS.keys() == every
    assert not FREE.keys() & MATHEMATICS.keys()


def changed(killed, stats, argv, name: str, value) -> list[str]:
    """Return the remarks about a run that goes on with another value of one field; UsageError if it is refused."""
    asked, options = parsing.parse([*argv, "--output_dir", str(killed)], OPTIONS)
    before = yaml.safe_load(to_yaml(asked, options))
    kind = next(o() for o in OPTIONS.values() if name in names_of(o())) if name not in names_of(RunConfig) else None
    if kind and name not in names_of(options):  # an option of another task: as if the run were of that
        state = json.loads((killed / "checkpoints/step_00000008/state.json").read_text())
        defaults = {
            f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default
            for f in dataclasses.fields(kind)
        }
        after = before | {name: [value] if isinstance(defaults[name], list) else value}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resume, "read_state", lambda folder: state | {"config": before | defaults})
            return resume.check_same_run(
                killed / "checkpoints/step_00000008", asked, stats, before | defaults | after, kind
            )
    asked, options = parsing.parse([*argv, "--output_dir", str(killed), *kit.flags(**{name: value})], OPTIONS)
    if name == "task":
        options = OPTIONS["causal_lm"]()()
    after = yaml.safe_load(to_yaml(asked, options))
    return resume.check_same_run(killed / "checkpoints/step_00000008", asked, stats, after, type(options))


@pytest.mark.parametrize("name", MATHEMATICS)
def test_a_change_of_the_mathematics_is_refused_old_and_new(files, killed, stats, name):
    with pytest.raises(UsageError, match=rf"holds another run \({name}: .* → .*\)") as refused:
        changed(killed, stats, recipe(files), name, MATHEMATICS[name])
    value = str(MATHEMATICS[name]).replace('"', "'")
    assert f"→ {value}" in str(refused.value)
    assert "--init_from" in str(refused.value)
    assert "--resume never" in str(refused.value)


@pytest.mark.parametrize("name", [name for name, value in FREE.items() if value is not None and name != "dry_run"])
def test_a_harmless_change_is_accepted_and_said(files, killed, stats, name):
    [remark] = changed(killed, stats, recipe(files), name, FREE[name])
    assert remark.startswith(f"changed since step_00000008: {name}: ")
    assert "→" in remark


def test_nothing_changed_says_nothing(files, killed, stats):
    assert find(killed, stats, recipe(files)) == (killed / "checkpoints" / "step_00000008", [])


def test_mutant_that_compares_nothing_is_caught(files, killed, stats, monkeypatch):
    monkeypatch.setattr(resume, "changeable_fields", lambda options: names_of(RunConfig) | names_of(options))
    for name in ("seed", "learning_rate", "packing"):
        assert changed(killed, stats, recipe(files), name, MATHEMATICS[name])  # said, but not refused


def test_all_that_differs_is_listed_and_all_ranks_end_with_2(files, run, tmp_path):
    before = contents(run)
    wrong = recipe(files, seed=7, learning_rate=1e-3, dtype="float64", logging_steps=5)
    codes, outputs = kit.run_command("train.py", *wrong, "--output_dir", "run", folder=tmp_path, world=2)
    assert codes == [2, 2], outputs
    assert "(seed: 42 → 7; dtype: float32 → float64; learning_rate: 0.003 → 0.001): " in outputs[0]
    assert "logging_steps" not in outputs[0].rstrip().splitlines()[-1]
    assert contents(run) == before


def test_harmless_changes_are_accepted_and_said_and_change_no_weight(files, straight, run):
    other = recipe(files, logging_steps=3, eval_steps=5, save_steps=2, report_to="none", save_total_limit=7)
    other += kit.flags(validation_file=files / "validation.jsonl", dataloader_num_workers=1)
    done = kit.run_training(1, run, *other)
    said = (run.with_suffix(".out") / "rank0.txt").read_text()
    for text in ("logging_steps: 1 → 3", "eval_steps: None → 5", "save_steps: 4 → 2", "report_to: None → ['none']"):
        assert f"changed since step_00000008: {text}" in said
    assert kit.same(done.weights, straight[1].weights)


# ---- data and model: by content ----------------------------------------------------------------------------------------


def moved(files, folder: Path) -> dict[str, Path]:
    folder.mkdir()
    return {
        name: Path(shutil.copy(files / before, folder / after))
        for name, before, after in (
            ("train_file", "train.jsonl", "rows.jsonl"),
            ("model_config", "gpt2.yaml", "model.yaml"),
        )
    }


def opened(files, **fields) -> dict:
    return kit.open_data(**fields_of(recipe(files, **fields)))[1]["train"].stats


def test_data_and_model_may_move(files, straight, run, tmp_path):
    """The same contents elsewhere, under other names."""
    done = kit.run_training(1, run, *recipe(files, **moved(files, tmp_path / "elsewhere")))
    assert kit.same(done.weights, straight[1].weights)
    said = (run.with_suffix(".out") / "rank0.txt").read_text()
    assert "step_00000008, step 8" in said
    assert f"train_file: {[str(files / 'train.jsonl')]} → {[str(tmp_path / 'elsewhere' / 'rows.jsonl')]}" in said
    assert "changed since step_00000008: model_config" in said


def test_data_of_the_same_size_with_other_contents_is_refused(files, killed, tmp_path):
    path = tmp_path / "train.jsonl"
    text = (files / "train.jsonl").read_text()
    at = text.rindex("]") - 1  # the last digit of the last id of the last row
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    assert path.stat().st_size == (files / "train.jsonl").stat().st_size
    with pytest.raises(UsageError, match=r"training data: 1003 rows → 1003 \(same sizes, other contents\)"):
        find(killed, opened(files, train_file=path), recipe(files, train_file=path))


def test_data_edited_in_place_is_refused_by_all_ranks(files, killed, tmp_path):
    """The whole way: same path, same size, prepared anew because its time has changed."""
    path = Path(shutil.copy(files / "train.jsonl", tmp_path / "train.jsonl"))
    kit.run_training(1, tmp_path / "run", *recipe(files, train_file=path, max_steps=2, lr_scheduler_type="constant"))
    rows = path.read_text().splitlines()
    path.write_text("\n".join([rows[1], rows[0], *rows[2:]]) + "\n")  # two rows change places
    before = contents(tmp_path / "run")
    flags = recipe(files, train_file=path, lr_scheduler_type="constant")
    codes, outputs = kit.run_command("train.py", *flags, "--output_dir", "run", folder=tmp_path, world=2)
    assert codes == [2, 2], outputs
    assert "training data: 1003 rows → 1003 (same sizes, other contents)" in outputs[0]
    assert contents(tmp_path / "run") == before


def test_one_row_more_is_refused_with_the_file(files, killed, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text((files / "train.jsonl").read_text() + '{"input_ids": [1, 2, 3]}\n')
    sizes = [file.stat().st_size for file in (files / "train.jsonl", path)]
    with pytest.raises(UsageError) as refused:
        find(killed, opened(files, train_file=path), recipe(files, train_file=path))
    assert f"training data: 1003 rows → 1004 (train.jsonl: {sizes[0]} → {sizes[1]} bytes)" in str(refused.value)


def test_mutant_fingerprint_of_names_and_sizes_only_is_caught(files, killed, tmp_path, monkeypatch):
    path = tmp_path / "train.jsonl"
    rows = (files / "train.jsonl").read_text().splitlines()
    path.write_text("\n".join([rows[1], rows[0], *rows[2:]]) + "\n")
    found = opened(files, train_file=path)
    with pytest.raises(UsageError):
        find(killed, found, recipe(files, train_file=path))

    def names_and_sizes(old, new):
        return [] if old["data"]["files"] == new["data"]["files"] else ["training data"], []

    monkeypatch.setattr(run_identity, "differences", names_and_sizes)
    assert find(killed, found, recipe(files, train_file=path)).folder  # without a word


def test_a_model_configuration_edited_in_place_is_refused_field_by_field(files, run, tmp_path):
    path = kit.write_yaml(tmp_path / "model.yaml", kit.GPT2 | {"attn_pdrop": 0.1, "n_inner": 64})
    with pytest.raises(UsageError) as refused:
        find(run, opened(files), recipe(files, model_config=path))
    assert "model configuration: attn_pdrop: 0.2 → 0.1; model configuration: n_inner: None → 64" in str(refused.value)
    same = kit.write_yaml(tmp_path / "same.yaml", dict(reversed(kit.GPT2.items())))  # another order of lines
    assert find(run, opened(files), recipe(files, model_config=same)).folder.name == "step_00000008"


def test_a_changed_tokenizer_is_refused(files, tmp_path):
    texts = [f"the {n}th text of a hundred, none of which is long" for n in range(100)]
    rows = kit.write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", texts)
    fields = {"train_file": rows, "tokenizer_name": tokenizer, "max_steps": 2, "save_steps": 2}
    fields |= {"lr_scheduler_type": "constant"}
    kit.run_training(1, tmp_path / "run", *recipe(files, **fields))
    assert find(tmp_path / "run", opened(files, **fields), recipe(files, **fields)).folder
    moved = Path(shutil.copytree(tokenizer, tmp_path / "moved"))
    start = find(
        tmp_path / "run",
        opened(files, **fields | {"tokenizer_name": moved}),
        recipe(files, **fields | {"tokenizer_name": moved}),
    )
    assert [note for note in start.notes if "tokenizer_name" in note]
    kit.tiny_tokenizer(tokenizer, texts, size=280)  # the same folder, other pieces
    with pytest.raises(UsageError, match=r"training data: 100 rows → 100 \(another tokenizer or options\)"):
        find(tmp_path / "run", opened(files, **fields), recipe(files, **fields))


# ---- the length --------------------------------------------------------------------------------------------------------

CAN = ("constant", "constant_with_warmup", "inverse_sqrt")
CANNOT = ("linear", "cosine")


@pytest.fixture
def with_schedule(killed, files, stats, tmp_path):
    """Return a function: what becomes of a run of 12 steps with a schedule, 8 of them done, that is to have others."""

    def go_on(schedule: str, **length) -> resume.ResumePoint:
        shutil.copytree(killed, tmp_path / "run", dirs_exist_ok=True)
        path = tmp_path / "run/checkpoints/step_00000008"
        fields = {"lr_scheduler_type": schedule, "warmup_steps": 3}
        asked, options = parsing.parse([*recipe(files, **fields), "--output_dir", str(tmp_path / "run")], OPTIONS)
        state = checkpoint_list.read_state(path) | {"config": yaml.safe_load(to_yaml(asked, options))}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resume, "read_state", lambda folder: state)
            patch.setattr(atomic_folder, "verify", lambda folder: [])
            return find(tmp_path / "run", stats, recipe(files, **fields | length))

    return go_on


@pytest.mark.parametrize("schedule", CAN)
@pytest.mark.parametrize("steps", [1000, 10])
def test_a_run_whose_schedule_does_not_know_its_end_may_become_longer_or_shorter(with_schedule, schedule, steps):
    assert with_schedule(schedule, max_steps=steps).notes == [f"changed since step_00000008: max_steps: 12 → {steps}"]


@pytest.mark.parametrize("schedule", CANNOT)
@pytest.mark.parametrize("steps", [1000, 10])
def test_a_run_whose_schedule_knows_its_end_may_not(with_schedule, schedule, steps):
    with pytest.raises(UsageError) as refused:
        with_schedule(schedule, max_steps=steps)
    assert f"length: 12 → {steps} steps, with which {schedule} would have had other learning rates" in str(
        refused.value
    )
    assert "constant, constant_with_warmup, inverse_sqrt can be prolonged" in str(refused.value)


def test_a_length_in_epochs_counts_as_the_steps_it_comes_to(with_schedule):
    """12 steps of 32 of 1003 examples are 0.375 epochs."""
    assert with_schedule("linear", max_steps=None, num_train_epochs=0.375).folder
    with pytest.raises(UsageError, match="length: 12 → 64 steps"):
        with_schedule("linear", max_steps=None, num_train_epochs=2)


def test_mutant_that_takes_any_length_is_caught(with_schedule, monkeypatch):
    monkeypatch.setattr(resume, "_schedule", lambda *_: [])
    assert with_schedule("linear", max_steps=1000).notes  # the learning rate would jump in the middle


def test_a_finished_run_that_is_prolonged_equals_one_of_that_length(files, tmp_path):
    flags = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
    kit.run_training(1, tmp_path / "run", *recipe(files, **flags, max_steps=6))
    run = kit.run_training(1, tmp_path / "run", *recipe(files, **flags, max_steps=10))
    whole = kit.run_training(1, tmp_path / "whole", *recipe(files, **flags, max_steps=10))
    assert kit.same(run.weights, whole.weights)
    assert run.losses() == whole.losses()
    assert (tmp_path / "run" / "old_final.old1").is_dir()
    assert "max_steps: 6 → 10" in (tmp_path / "run.out" / "rank0.txt").read_text()


# ---- a new run from old weights ----------------------------------------------------------------------------------------


def _weights_at_the_start(argv):
    """Train on this rank; return the model's weights before the first step, and the step it begins with."""
    seen = {}

    def spy(strategy, module, optimizer):
        seen["weights"] = {name: value.clone() for name, value in module.model.state_dict().items()}

    kit.after_prepare(spy)
    train.main([str(word) for word in argv])
    return seen["weights"]


@pytest.mark.parametrize("what", ["", "final", "checkpoints/step_00000008"])
def test_init_from_begins_a_new_run_with_the_weights_of_another(files, straight, tmp_path, what):
    source = straight[1].folder / what
    flags = recipe(files, init_from=source, max_steps=2, seed=5, learning_rate=1e-4)
    argv = [*flags, "--output_dir", tmp_path / "run"]
    [weights] = kit.spawn(1, _weights_at_the_start, argv, out=tmp_path / "out")
    there = source if (source / "model.safetensors").exists() else source / "final"
    stored = load_file(there / "model.safetensors")
    assert stored.keys() <= weights.keys()  # tied ones are stored once
    assert all(kit.torch.equal(weights[name], stored[name]) for name in stored)
    run = kit.Run(tmp_path / "run")
    assert [line["step"] for line in run.kind("train")] == [1, 2]
    # A new run: its moments begin at zero, its order with its own seed.
    moments = load_file(tmp_path / "run/checkpoints/step_00000002/optimizer.safetensors")
    assert moments["step/transformer.wte.weight"] == 2
    plan = json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[0])["plan"]
    assert plan["seed"] == 5


def test_init_from_a_run_that_is_not_finished_takes_its_newest_intact_checkpoint(run):
    asked = RunConfig(init_from=str(run))
    assert weights.init_weights(asked) == run / "checkpoints" / "step_00000008"
    damage(run, "model.safetensors", "its last bit flipped")
    assert weights.init_weights(asked) == run / "checkpoints" / "step_00000004"
    damage(run, "config.json", "removed", step=4)
    with pytest.raises(UsageError, match=r"init_from: .* neither a checkpoint nor a run with an intact one \(of 2\)"):
        weights.init_weights(asked)


@pytest.mark.parametrize("what", ["checkpoints/step_00000008", "final", ""])
def test_init_from_finds_every_damage(straight, tmp_path, what):
    shutil.copytree(straight[1].folder, tmp_path / "run")
    source = tmp_path / "run" / what
    folder = source if what else source / "final"
    assert weights.init_weights(RunConfig(init_from=str(source))) == folder
    missed = []
    for path in sorted(folder.iterdir()):
        for how, hurt in DAMAGE.items():
            data = path.read_bytes()
            hurt(path)
            try:
                # A run whose final model has lost its configuration has checkpoints still.
                if atomic_folder.verify(weights.init_weights(RunConfig(init_from=str(source)))):
                    missed.append(f"{path.name} {how}")
            except UsageError as error:
                if not str(error).startswith("init_from: "):
                    missed.append(f"{path.name} {how}: {error}")
            path.write_bytes(data)
    # A final folder without a manifest is what any folder of the Hub is.
    assert missed == ([] if "step" in what else ["manifest.json removed"])


@pytest.mark.parametrize("world", [1, 2])
def test_init_from_a_damaged_folder_or_none_ends_all_ranks_with_2(files, run, tmp_path, world):
    damage(run, "model.safetensors", "a bit in the middle flipped")
    for source, said in (
        ("run/checkpoints/step_00000008", "step_00000008 is damaged: model.safetensors: its hash is not"),
        (str(files), "is neither a checkpoint nor a run"),
        ("nowhere", "init_from: nowhere is neither a checkpoint nor a run"),
    ):
        argv = [*recipe(files, init_from=source), "--output_dir", "new"]
        codes, outputs = kit.run_command("train.py", *argv, folder=tmp_path, world=world)
        assert codes == [2] * world, outputs
        assert said in outputs[0]
        assert not (tmp_path / "new" / "metrics.jsonl").exists()


# ---- O(1) --------------------------------------------------------------------------------------------------------------


def _rows_read(argv, replay: bool = False):
    """Train on this rank; return the ids of all rows that were read, in order, and those trained on."""
    from src.data import data_loader
    from src.data.prepared_split import Split

    read, trained, rows, gradient, order = [], [], Split.rows, train.compute_gradient, data_loader.training_order

    def spy(self, ids):
        read.extend(np.asarray(ids).tolist())
        return rows(self, ids)

    def seen(strategy, module, window, *rest):
        trained.extend(i for micro, _ in window for i in micro.ids.tolist())
        return gradient(strategy, module, window, *rest)

    Split.rows, train.compute_gradient = spy, seen
    if replay:  # as skip_first_batches does: from the start, and thrown away

        def windows(batches, original=data_loader.group_into_windows):
            for n, item in enumerate(original(batches)):
                if n >= first[0]:
                    yield item

        first = [0]

        def training_order(config, rank, world, start, stop):
            first[0] = start
            return order(config, rank, world, 0, stop)

        data_loader.group_into_windows, data_loader.training_order = windows, training_order
    train.main([str(word) for word in argv])
    return read, trained


@pytest.mark.parametrize("replay", [False, True])
def test_a_resumed_run_reads_only_what_it_trains_on(files, run, tmp_path, replay):
    argv = [*recipe(files), "--output_dir", run]
    [(read, trained)] = kit.spawn(1, _rows_read, argv, replay, out=tmp_path / "out")
    assert len(trained) == (STEPS - 8) * 32
    if replay:  # the mutant
        assert len(read) == STEPS * 32
    else:
        assert read == trained


def test_entering_the_order_at_step_a_billion_is_as_cheap_as_at_its_start():
    """No permutation of all examples is made, no step before is looked at."""
    from itertools import islice

    from src.data.batch_plan import PlanConfig, training_order

    asked = []

    class Lengths:
        def __getitem__(self, ids):
            asked.extend(ids.tolist())
            return np.ones(len(ids), np.int64)

    order = training_order(PlanConfig(10**9, 32, 8, 42, Lengths()), 0, 1, 10**9, 10**9 + 2)
    ids = [i for micro in islice(order, 4) for i in micro.ids.tolist()]
    assert sorted(asked) == sorted(ids)
    assert len(ids) == 32
