"""FSDP2 and HSDP, by accelerate's own code over gloo: the numbers of one process, and checkpoints that fit any strategy."""

import errno
import faulthandler
import json
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

import train
from src.checkpointing import async_writer, checkpoint_list, format, model_folder, sharded
from src.distributed.fsdp2 import FSDP2
from src.distributed.host_group import HostGroup
from src.distributed.strategies import Strategy
from src.models.build_model import build_model
from src.storage import atomic_folder
from src.tasks import causal_lm
from src.training import evaluation, step
from src.training.state import DeviceFlag
from tests.helpers import kit

pytestmark = pytest.mark.cluster
STEPS = 20  # each of 32 examples in micro-batches of 4: three ranks have 3, 3 and 2 of them


def recipe(files, model: str = "llama.yaml", **fields) -> list[str]:
    values = {
        "model_config": files / model,
        "train_file": files / "train.jsonl",
        "validation_file": files / "validation.jsonl",
        "per_device_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant_with_warmup",  # so that a part of the run has the rates of the whole
        "warmup_steps": 5,
        "logging_steps": 1,
        "eval_steps": 5,
        "save_steps": 5,
        "save_total_limit": 99,
    }
    return kit.flags(**values | fields)


def where(name: str, world: int, **keys) -> dict[str, str]:
    return kit.where(name, world, **{"mixed_precision": "no"} | keys)


def command(flags: list[str], folder: Path, world: int, env: dict, **more) -> tuple[list, list[str]]:
    """Return (exit codes, what the ranks printed) of a run in `folder`/run."""
    folder.mkdir(exist_ok=True)
    return kit.run_command("train.py", *flags, "--output_dir", "run", folder=folder, world=world, env=env, **more)


def at_step(run: kit.Run | Path, number: int) -> Path:
    return getattr(run, "folder", run) / "checkpoints" / f"step_{number:08d}"


def saved(folder: Path) -> list[int]:
    """Return the steps of the checkpoints of a run, all of which must be intact, with nothing half-written anywhere."""
    found = checkpoint_list.list_checkpoints(folder)
    assert [atomic_folder.verify(path) for path in found] == [[]] * len(found)
    assert not [path for path in folder.rglob(".*") if path.suffix in (".tmp", ".parts", ".old")]
    return [checkpoint_list.step_of(path) for path in found]


def same_state(one: Path, other: Path) -> bool:
    """Return whether two checkpoints hold the same weights and moments, to the last bit."""
    return all(kit.same(kit.load_weights(one, part), kit.load_weights(other, part)) for part in ("model", "optimizer"))


def check_same_numbers(one: kit.Run, other: kit.Run) -> None:
    """Assert the same examples in every step, and what is computed from them within the last digits of float32."""
    assert kit.ledger_text(one.folder) == kit.ledger_text(other.folder)
    for kind, names in (("train", ("loss", "grad_norm", "weight")), ("eval", ("loss", "weight", "examples"))):
        for a, b in zip(one.kind(kind), other.kind(kind), strict=True):
            assert a["step"] == b["step"]
            for name in names:
                assert b[name] == pytest.approx(a[name], rel=1e-6)


@pytest.fixture(scope="module")
def one(files, tmp_path_factory) -> kit.Run:
    """The run on one process."""
    return kit.run_training(1, tmp_path_factory.mktemp("one") / "run", *recipe(files))


@pytest.fixture(scope="module")
def two(files, tmp_path_factory) -> kit.Run:
    """The run under FSDP2 on two ranks."""
    return kit.run_training(2, tmp_path_factory.mktemp("two") / "run", *recipe(files), env=where("fsdp2", 2))


def begun(run: kit.Run, folder: Path, step: int) -> Path:
    """Return a copy of a run as it was after some step, as a kill leaves it: lines and steps beyond its last checkpoint."""
    shutil.copytree(run.folder, folder)
    shutil.rmtree(folder / "final")
    for path in checkpoint_list.list_checkpoints(folder):
        if checkpoint_list.step_of(path) > step:
            shutil.rmtree(path)
    return folder


# ---- the numbers -------------------------------------------------------------------------------------------------------


def test_two_ranks_train_what_one_process_trains(one, two):
    check_same_numbers(one, two)
    assert kit.distance(one.weights, two.weights) <= 1e-5


@pytest.mark.parametrize(
    "name, world, keys, fields",
    [
        ("fsdp2", 3, {}, {}),
        ("fsdp2", 4, {"fsdp_cpu_ram_efficient_loading": False}, {}),
        ("hsdp", 4, {}, {}),
        ("fsdp2", 2, {"fsdp_activation_checkpointing": True}, {}),
        ("fsdp2", 2, {"fsdp_reshard_after_forward": False}, {"sync_each_batch": False, "gradient_checkpointing": True}),
    ],
)
def test_so_does_every_other_split(files, one, tmp_path, name, world, keys, fields):
    run = kit.run_training(
        world, tmp_path / "run", *recipe(files, save_steps=99, **fields), env=where(name, world, **keys)
    )
    check_same_numbers(one, run)
    assert kit.distance(one.weights, run.weights) <= 1e-5
    moments = [kit.load_weights(at_step(r, STEPS), "optimizer") for r in (one, run)]
    assert kit.distance(*moments) <= 1e-5


def test_sgd_updates_shards_without_a_fused_kernel(files, tmp_path):
    flags = recipe(files, optim="sgd", learning_rate=0.1, max_steps=4, eval_steps=4, save_steps=99, warmup_steps=0)
    one = kit.run_training(1, tmp_path / "one", *flags)
    run = kit.run_training(2, tmp_path / "run", *flags, env=where("fsdp2", 2))
    check_same_numbers(one, run)


def test_a_frozen_part_and_a_saved_buffer_are_those_of_the_main_process(files, tmp_path, monkeypatch):
    """Frozen at the end of `build`, as people do, where the ranks that get an empty model have left already."""
    build = causal_lm.Task.build

    def edited(self, weights=None, empty=False):
        model = build(self, weights, empty)
        model.register_buffer("mark", torch.full((3,), 0.0 if empty else 7.0))
        if not empty:
            model.get_input_embeddings().requires_grad_(False)
        return model

    monkeypatch.setattr(causal_lm.Task, "build", edited)
    flags = recipe(files, max_steps=4, eval_steps=4, save_steps=99, warmup_steps=0)
    one = kit.run_training(1, tmp_path / "one", *flags)
    run = kit.run_training(2, tmp_path / "run", *flags, env=where("fsdp2", 2))
    check_same_numbers(one, run)
    assert run.weights["mark"].tolist() == [7.0] * 3
    moments = {name.split("/", 1)[1] for name in kit.load_weights(at_step(run, 4), "optimizer")}
    assert not any("embed_tokens" in name for name in moments)


@pytest.fixture(scope="module")
def dropped(files, tmp_path_factory) -> tuple[list[str], kit.Run]:
    """A model with dropout and tied embeddings on one process."""
    flags = recipe(files, "gpt2.yaml", max_steps=10, save_steps=10)
    return flags, kit.run_training(1, tmp_path_factory.mktemp("dropped") / "run", *flags)


@pytest.mark.parametrize("name, world", [("fsdp2", 2), ("hsdp", 4)])
def test_dropout_masks_and_tied_weights_are_those_of_one_process(dropped, tmp_path, name, world):
    flags, alone = dropped
    run = kit.run_training(world, tmp_path / "run", *flags, env=where(name, world))
    check_same_numbers(alone, run)
    assert run.weights.keys() == alone.weights.keys()
    assert "lm_head.weight" not in run.weights
    moments = [kit.load_weights(at_step(r, 10), "optimizer") for r in (alone, run)]
    assert moments[0].keys() == moments[1].keys()


def test_mutant_without_the_seed_of_the_micro_batch_is_caught(dropped, tmp_path, monkeypatch):
    flags, alone = dropped
    monkeypatch.setattr(step, "seed_everything", lambda seed: None)
    run = kit.run_training(2, tmp_path / "run", *flags, env=where("fsdp2", 2))
    with pytest.raises(AssertionError):
        check_same_numbers(alone, run)


def test_weights_that_would_be_trained_apart_are_refused(dropped, tmp_path, monkeypatch):
    """As accelerate leaves them whose module has no method to tie them again: it trains, and ends somewhere else."""
    monkeypatch.setattr(step.ModelWithLoss, "tie_weights", lambda self: None)
    codes, outputs = command(dropped[0], tmp_path / "here", 2, where("fsdp2", 2))
    assert codes == [1, 1], outputs
    assert "failed: weights that the model ties would be trained apart" in outputs[0]


# ---- equal forward passes ----------------------------------------------------------------------------------------------


def uneven(files, **fields) -> list[str]:
    """Return a recipe by which two ranks have one and two micro-batches in a step, and one and none in an evaluation."""
    rest = {
        "global_batch_size": 12,
        "max_eval_examples": 8,
        "max_steps": 2,
        "save_steps": 99,
        "warmup_steps": 1,
    }
    return recipe(files, **rest | fields)


@pytest.mark.parametrize("mutant", ["", "training", "evaluation"])
def test_ranks_with_fewer_micro_batches_run_fillers_without_which_nobody_ends_well(
    files, tmp_path, monkeypatch, mutant
):
    if mutant == "training":
        monkeypatch.setattr(Strategy, "pad_with_dummy_batches", lambda self, window, forwards: window)
    if mutant == "evaluation":  # gloo may crash where collectives do not fit together, which would be a page of text

        def unpadded(strategy, micro_batches, rounds):
            faulthandler.disable()
            return micro_batches[strategy.data_rank :: strategy.data_world_size]

        monkeypatch.setattr(evaluation, "_share_of_rank", unpadded)
    codes, outputs = command(uneven(files, ddp_timeout=10 if mutant else 120), tmp_path / "here", 2, where("fsdp2", 2))
    assert (codes == [0, 0]) == (not mutant), outputs
    assert not mutant or 0 not in codes


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    return kit.write_jsonl(tmp_path_factory.mktemp("single") / "one.jsonl", [{"input_ids": list(range(9))}])


@pytest.mark.parametrize("world, name, rows", [(2, "fsdp2", 103), (3, "fsdp2", 103), (4, "fsdp2", 1)])
def test_an_evaluation_counts_every_row_once(files, one, single, tmp_path, world, name, rows):
    """Equal to the last bit, because a gathered weight has the bits that it had before it was sharded."""
    file = single if rows == 1 else files / "validation.jsonl"
    flags = kit.flags(checkpoint=one.folder / "final", validation_file=file)
    found = kit.run_evaluation(world, tmp_path / "here", *flags, env=where(name, world))
    alone = one.kind("eval")[-1] if rows > 1 else kit.run_evaluation(1, tmp_path / "alone", *flags)
    assert found["examples"] == rows
    assert {name: alone[name] for name in found} == found


# ---- what travels ------------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts the collectives of this process by name. (torch's CommDebugMode does not survive a window of several passes.)"""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def _count_collectives(argv, mutant: bool):
    """Train on this rank; return the collectives of each step's gradient, and the sizes of the vectors agreed on."""
    steps, vectors = [], []
    gradient, call, sync = train.compute_gradient, HostGroup.sum, FSDP2.gradient_sync

    def counted(*args):
        with Collectives() as collectives:
            result = gradient(*args)
        steps.append(dict(collectives.counts))
        return result

    train.compute_gradient = counted
    HostGroup.sum = lambda self, values: (vectors.append(len(values)), call(self, values))[1]
    if mutant:  # as accelerate does whose gradient accumulation is not used
        FSDP2.gradient_sync = lambda self, module, last: sync(self, module, True)
    train.main([str(word) for word in argv])
    return steps, vectors


GROUPS = 3  # of parameters: two layers, and all the rest


@pytest.mark.parametrize(
    "name, world, each, mutant, scattered, reduced",
    [
        ("fsdp2", 2, True, False, 4 * GROUPS, 0),
        ("fsdp2", 2, False, False, GROUPS, 0),
        ("hsdp", 4, True, False, 4 * GROUPS, GROUPS),
        ("hsdp", 4, True, True, 4 * GROUPS, 4 * GROUPS),
    ],
)
def test_gradients_are_reduced_as_often_as_the_run_file_says(
    files, tmp_path, name, world, each, mutant, scattered, reduced
):
    """In a window of four micro-batches. Over copies of the model, which may be on nodes far apart, once a step."""
    fields = {"per_device_batch_size": 8 // world, "max_steps": 2, "warmup_steps": 1, "max_eval_examples": 8}
    argv = [
        *recipe(files, **fields, logging_steps=100, save_steps=99, sync_each_batch=each),
        "--output_dir",
        tmp_path / "run",
    ]
    found = kit.spawn(world, _count_collectives, argv, mutant, out=tmp_path / "out", env=where(name, world))
    for steps, vectors in found:
        gathered = 4 * (2 * GROUPS - 1)  # in each pass: forward, and backward but for the last layers
        assert [counts["_allgather_base_"] for counts in steps] == [gathered] * 2
        assert [counts["_reduce_scatter_base_"] for counts in steps] == [scattered] * 2
        assert [counts.get("allreduce_", 0) for counts in steps] == [reduced] * 2
        assert vectors[:2] == [9 + world] * 2  # what DDP agrees on, and how many micro-batches each rank has


# ---- checkpoints -------------------------------------------------------------------------------------------------------


def test_every_rank_writes_a_file_and_none_holds_a_pickle(two):
    assert saved(two.folder) == [5, 10, 15, 20]
    assert {path.suffix for path in two.folder.rglob("*") if path.is_file()} <= {
        ".safetensors",
        ".json",
        ".jsonl",
        ".yaml",
        ".md",
        ".log",
    }
    for folder, parts in ((at_step(two, 10), ("model", "optimizer")), (two.folder / "final", ("model",))):
        listed = json.loads((folder / atomic_folder.MANIFEST).read_text())["files"]
        for part in parts:
            names = [f"{part}-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
            assert set(names) <= listed.keys()
            held = [set(safe_open(folder / name, "pt").keys()) for name in names]
            assert all(held)
            assert not held[0] & held[1]


@pytest.mark.parametrize("folder", ["checkpoints/step_00000010", "final"])
def test_transformers_reads_what_all_ranks_have_written(two, folder):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(two.folder / folder, output_loading_info=True)
    assert not any(info.values())
    assert kit.same(dict(model.state_dict()), kit.load_weights(two.folder / folder))


def test_a_checkpoint_holds_what_that_of_one_process_holds(one, two):
    for number in (5, 20):
        for part in ("model", "optimizer"):
            parts = [kit.load_weights(at_step(run, number), part) for run in (one, two)]
            assert kit.distance(*parts) <= 2e-6
        states = [checkpoint_list.read_state(at_step(run, number)) for run in (one, two)]
        assert states[0]["progress"] | {"best": 0} == states[1]["progress"] | {"best": 0}
        assert states[0]["numbers"] == states[1]["numbers"]


@pytest.mark.parametrize("world", [1, 6])
def test_one_process_and_more_processes_than_layers_write_checkpoints_too(tmp_path, world):
    """A layer, two embeddings, weight and bias of a norm are shared out, so one of six ranks has nothing to write."""
    fields = {"global_batch_size": 12, "per_device_batch_size": 2, "max_steps": 4, "save_steps": 2, "logging_steps": 1}
    flags = kit.flags(**kit.tiny_files(tmp_path) | fields)
    alone = kit.run_training(1, tmp_path / "alone", *flags)
    run = kit.run_training(world, tmp_path / "run", *flags, env=where("fsdp2", world))
    assert len(list((run.folder / "final").glob("model*.safetensors"))) == min(world, 5)
    assert kit.distance(alone.weights, run.weights) <= 1e-4
    assert saved(run.folder) == [2, 4]
    shutil.rmtree(at_step(run, 4))
    again = kit.run_training(2, run.folder, *flags, env=where("fsdp2", 2))
    assert again.losses() == pytest.approx(alone.losses(), rel=1e-6)


@pytest.mark.parametrize("mutant", [False, True])
def test_resumed_on_as_many_ranks_it_is_bitwise_the_same(files, two, tmp_path, monkeypatch, mutant):
    """The mutant leaves the moments as they are in a new optimizer."""
    if mutant:
        monkeypatch.setattr(Strategy, "load_moments", lambda *args: None)
    folder = begun(two, tmp_path / "run", 15)
    run = kit.run_training(2, folder, *recipe(files), env=where("fsdp2", 2))
    assert kit.same(run.weights, two.weights) == (not mutant)
    assert same_state(at_step(run, 20), at_step(two, 20)) == (not mutant)
    assert (kit.timeless(run.folder) == kit.timeless(two.folder)) == (not mutant)


def test_a_run_moves_from_strategy_to_strategy(files, one, two, tmp_path):
    """FSDP2 on two ranks, then on three, then DDP on two, then one process; or at last HSDP on four."""
    folder = begun(two, tmp_path / "run", 5)
    kit.run_training(3, folder, *recipe(files, max_steps=10), env=where("fsdp2", 3))
    kit.run_training(2, folder, *recipe(files, max_steps=15))
    shutil.copytree(folder, tmp_path / "other")
    last = [kit.run_training(1, folder, *recipe(files))]
    last += [kit.run_training(4, tmp_path / "other", *recipe(files), env=where("hsdp", 4))]
    for run in last:
        check_same_numbers(one, run)
        assert [line["step"] for line in run.kind("train")] == list(range(1, STEPS + 1))
        assert kit.distance(one.weights, run.weights) <= 1e-5
        assert saved(run.folder) == [5, 10, 15, 20]


def test_a_flipped_bit_in_the_file_of_another_rank_is_noticed(files, two, tmp_path):
    folder = begun(two, tmp_path / "run", 15)
    file = at_step(folder, 15) / "model-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    run = kit.run_training(2, folder, *recipe(files), env=where("fsdp2", 2))
    assert f"damaged and not used: {file.name}" in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert kit.same(run.weights, two.weights)


# ---- faults ------------------------------------------------------------------------------------------------------------


def at_write(monkeypatch, numbers, rank: int, act) -> None:
    """Let `act` happen on one rank when it has written its part of these checkpoints (20: and of the final model)."""
    write, export = format.write_checkpoint, model_folder.write_final

    def wrote(folder, model_with_loss, tensors, state, mine=0, world=1):
        write(folder, model_with_loss, tensors, state, mine, world)
        if mine == rank and state["progress"]["step"] in numbers:
            act()

    monkeypatch.setattr(format, "write_checkpoint", wrote)
    if numbers == ["final"]:
        monkeypatch.setattr(
            model_folder, "write_final", lambda *args: (export(*args), act() if args[4] == rank else None)
        )


def disk_full():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fails_on_one_rank_costs_a_checkpoint_and_not_the_run(files, two, tmp_path, monkeypatch, rank):
    at_write(monkeypatch, [15], rank, disk_full)
    folder = begun(two, tmp_path / "here" / "run", 10)
    codes, outputs = command(recipe(files), tmp_path / "here", 2, where("fsdp2", 2))
    assert codes == [0, 0], outputs
    assert "THE CHECKPOINT OF STEP 15 COULD NOT BE SAVED: " in outputs[0]
    assert "No space left on device" in outputs[0]
    assert "failure 1 of 3 in a row" in outputs[0]
    assert saved(folder) == [5, 10, 20]
    assert same_state(at_step(folder, 20), at_step(two, 20))


def test_a_rank_that_cannot_even_leave_word_costs_no_more(files, two, tmp_path, monkeypatch):
    """Its disk takes nothing at all at steps 12 and 16; the success in between begins the count anew on all ranks."""
    deliver, calls = sharded.ShardWriters.write_shard, [0]

    def failing(self, parts, write):
        calls[0] += 1
        if calls[0] in (1, 3):
            disk_full()
        return deliver(self, parts, write)

    monkeypatch.setattr(sharded.ShardWriters, "write_shard", failing)
    monkeypatch.setattr(async_writer, "SHARD_TIMEOUT", 3.0)
    folder = begun(two, tmp_path / "here" / "run", 10)
    flags = recipe(files, save_steps=2, max_failed_saves=2)
    codes, outputs = command(flags, tmp_path / "here", 2, where("fsdp2", 2))
    assert codes == [0, 0], outputs
    assert "rank 1 has not written its part: do all nodes see this folder?" in outputs[0]
    assert "failure 2" not in "".join(outputs)
    assert saved(folder) == [5, 10, 14, 18, 20]
    assert kit.same(kit.Run(folder).weights, two.weights)


def test_a_final_model_that_one_rank_cannot_write_fails_the_run_and_the_same_command_mends_it(
    files, two, tmp_path, monkeypatch
):
    folder, flags = tmp_path / "here", [*recipe(files), "--resume", at_step(two, 15)]
    with monkeypatch.context() as patch:
        at_write(patch, ["final"], 1, disk_full)
        codes, outputs = command(flags, folder, 2, where("fsdp2", 2))
    assert codes == [1, 1], outputs
    assert "No space left on device, on rank 1" in outputs[0]
    run = kit.run_training(2, folder / "run", *recipe(files), env=where("fsdp2", 2))
    assert kit.same(run.weights, two.weights)
    assert saved(run.folder) == [20]


@pytest.mark.parametrize("number", [20, "final"])
def test_killed_while_parts_are_written_it_goes_on_from_the_checkpoint_before(
    files, two, tmp_path, monkeypatch, number
):
    folder, mark = begun(two, tmp_path / "here" / "run", 15), tmp_path / "written"
    with monkeypatch.context() as patch:
        at_write(patch, [number], 1, lambda: (mark.touch(), time.sleep(60)))
        argv = [*recipe(files), "--output_dir", "run"]
        ranks = kit.Ranks("train.py", *argv, folder=folder.parent, world=2, env=where("fsdp2", 2))
        kit.until(mark.exists)
        ranks.signal(signal.SIGKILL)
        assert ranks.wait() == [-signal.SIGKILL] * 2
    assert list(folder.rglob(".*.parts"))
    assert checkpoint_list.newest_intact(folder) == at_step(folder, 15 if number == 20 else 20)
    assert not (folder / "final").exists()
    run = kit.run_training(2, folder, *recipe(files), env=where("fsdp2", 2))
    assert kit.same(run.weights, two.weights)
    assert saved(folder) == [5, 10, 15, 20]


def poison(monkeypatch, number: int) -> None:
    """Let the loss of the second of two ranks be no number in one step."""
    gradient, loss = train.compute_gradient, causal_lm.Task.loss

    def spoiled(strategy, module, window, *rest):
        wrong = window[-1][0].step + 1 == number and strategy.accelerator.process_index == 1
        module.task.factor = float("nan") if wrong else 1.0
        return gradient(strategy, module, window, *rest)

    monkeypatch.setattr(train, "compute_gradient", spoiled)
    monkeypatch.setattr(
        causal_lm.Task, "loss", lambda self, *args: (r := loss(self, *args)) | {"loss": r["loss"] * self.factor}
    )


def naive_update(strategy, module, optimizer, learning_rate, max_grad_norm):
    norm = strategy.accelerator.clip_grad_norm_(module.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor(), DeviceFlag(torch.tensor(False))


@pytest.mark.parametrize("mutant", [False, True])
def test_a_loss_that_is_no_number_on_one_rank_changes_nothing_on_any(files, two, tmp_path, monkeypatch, mutant):
    poison(monkeypatch, 7)
    if mutant:
        monkeypatch.setattr(train, "optimizer_step", naive_update)
    folder = begun(two, tmp_path / "run", 5)
    flags = recipe(files, max_steps=8, save_steps=1, eval_steps=99)
    run = kit.run_training(2, folder, *flags, env=where("fsdp2", 2))
    same = [same_state(at_step(run, number), at_step(run, number + 1)) for number in (5, 6, 7)]
    assert same == [False, not mutant, False]
    assert run.kind("train")[-1]["skipped"] == (not mutant)
    assert any(value.isnan().any() for value in run.weights.values()) == mutant


# ---- memory and precision ----------------------------------------------------------------------------------------------


def _masters(argv):
    """Train on this rank; return what its weights are once they are sharded, and how often it built a model, empty or not."""
    found, built = [], []
    build = causal_lm.Task.build

    def look(strategy, module, optimizer):
        found.extend((type(p.data).__name__, p.dtype, p.to_local().numel(), p.numel()) for p in module.parameters())

    def building(self, weights=None, empty=False):
        built.append(empty)
        return build(self, weights, empty)

    causal_lm.Task.build = building
    kit.after_prepare(look)
    train.main([str(word) for word in argv])
    return found, built


@pytest.fixture(scope="module")
def low(files, tmp_path_factory):
    """(folder, what each rank held) of a run in bfloat16 mixed precision."""
    folder = tmp_path_factory.mktemp("low")
    argv = [*recipe(files, max_steps=10), "--output_dir", folder / "run"]
    held = kit.spawn(2, _masters, argv, out=folder / "out", env=kit.where("fsdp2", 2))
    return folder / "run", held


def test_weights_stay_float32_under_mixed_precision(one, low):
    folder, held = low
    for found, _ in held:
        assert {(name, dtype) for name, dtype, *_ in found} == {("DTensor", torch.float32)}
        assert all(own <= -(-every // 2) for *_, own, every in found)
    run = kit.Run(folder)
    for part in (at_step(run, 10), folder / "final"):
        assert json.loads((part / "config.json").read_text())["dtype"] == "float32"
        assert {value.dtype for value in kit.load_weights(part).values()} == {torch.float32}
    assert {value.dtype for value in kit.load_weights(at_step(run, 10), "optimizer").values()} == {torch.float32}
    losses = list(zip(run.losses(), one.losses()[:10], strict=True))
    assert all(a == pytest.approx(b, rel=1e-2) for a, b in losses)
    assert any(abs(a - b) > 1e-6 for a, b in losses)  # matrix products are not in float32


def test_an_evaluation_computes_in_the_precision_of_training(files, low, tmp_path):
    folder, _ = low
    found = kit.run_evaluation(3, tmp_path / "here", "--checkpoint", folder / "final", env=kit.where("fsdp2", 3))
    assert found["loss"] == kit.Run(folder).kind("eval")[-1]["loss"]


def test_only_the_main_process_reads_or_draws_weights(low):
    assert [built for _, built in low[1]] == [[False], [True]]


def _resident(folder: Path, empty: bool) -> float:
    """Return by how many MB the memory of this process has grown when it has built a model of 205 MB."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from src.config.parsing import RunConfig

    config = AutoConfig.for_model(**kit.LLAMA | {"vocab_size": 25_000, "hidden_size": 1024})
    pages = lambda: int(Path("/proc/self/statm").read_text().split()[1])  # noqa: E731
    before = pages()
    model = build_model(RunConfig(), config, AutoModelForCausalLM, empty=empty)
    assert sum(p.nbytes for p in model.parameters()) > 205e6
    return (pages() - before) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.parametrize("empty", [True, False])
def test_a_model_that_is_to_be_filled_costs_no_memory(tmp_path, empty):
    """The mutant is the model with its weights."""
    [grown] = kit.spawn(1, _resident, tmp_path, empty, out=tmp_path / "out")
    assert (grown < 30) == empty, grown


def test_a_layer_that_the_model_does_not_have_is_refused_by_name(files, tmp_path):
    env = where("fsdp2", 2) | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "NoSuchLayer"}
    codes, outputs = command(recipe(files), tmp_path / "here", 2, env)
    assert codes == [2, 2], outputs
    assert "fsdp_transformer_layer_cls_to_wrap: " in outputs[0]
    assert "NoSuchLayer" in outputs[0]
    assert not (tmp_path / "here" / "run").exists()


@pytest.mark.parametrize(
    "name, world, keys, fields, said",
    [
        ("fsdp2", 2, {"mixed_precision": "bf16"}, {"dtype": "bfloat16"}, "dtype is bfloat16, but FSDP2 keeps float32"),
        ("fsdp2", 2, {"mixed_precision": "bf16"}, {"dtype": "float64"}, "dtype is float64, but the accelerate file"),
        ("fsdp2", 2, {}, {"per_device_batch_size": "auto"}, "per_device_batch_size is auto, which cannot be tried out"),
        ("fsdp2", 2, {"fsdp_version": 1}, {}, "fsdp_version is 1: give 2"),
        ("hsdp", 4, {"parallelism_config_dp_replicate_size": 3}, {}, "dp_replicate_size 3 does not divide 4"),
        ("hsdp", 2, {}, {}, "dp_replicate_size 2 does not divide 2"),
        ("fsdp2_offload", 2, {}, {}, "fsdp_offload_params is true, but there is no accelerator"),
    ],
)
def test_what_cannot_be_had_is_refused_by_all_ranks_before_anything_is_written(
    files, tmp_path, name, world, keys, fields, said
):
    folder = tmp_path / "here"
    codes, outputs = command(recipe(files, **fields), folder, world, where(name, world, **keys))
    assert codes == [2] * world, outputs
    assert said in outputs[0]
    assert "Traceback" not in "".join(outputs)
    assert list(folder.iterdir()) == []
