"""What fits where: the counted model is the real one, and the arithmetic gives the bytes that two ranks really hold."""

import re
from contextlib import contextmanager

import pytest
import torch

from src.config import parsing
from src.config.errors import UsageError
from src.distributed import fsdp2
from src.models import memory_estimate
from src.models.memory_estimate import Strategy
from src.reporting import memory_command
from src.runtime.exit_codes import run_main
from src.tasks import OPTIONS, make_task
from tests.helpers import kit

pytestmark = pytest.mark.cluster

L70 = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def ready(**flags):
    """Return (run, options) as the command gets them."""
    run, options = parsing.parse(kit.flags(**{"train_file": "-", "max_length": 64} | flags), OPTIONS)
    return run, options


def printed(capsys, **flags) -> str:
    memory_command.main(kit.flags(**flags))
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # the second ties its embeddings
def test_parameters_are_those_of_the_real_model(files, name):
    run, options = ready(model_config=files / f"{name}.yaml")
    empty, _ = memory_command._model(run, options)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    task = make_task(run, options)
    task.load()
    model = task.build()
    n = memory_estimate.count(empty)
    assert n == memory_estimate.count(model)
    assert n.parameters == sum(p.numel() for p in model.parameters())
    assert n.layers == 2
    assert n.parameters == n.rest + n.layers * n.layer
    for p in list(model.parameters())[1:]:
        p.requires_grad = False
    assert memory_estimate.count(model).trained == next(model.parameters()).numel()


# ---- against the bytes of two ranks -----------------------------------------------------------------------------------


def _held(argv):
    """Train a step; return what this rank holds at its end, and whole gradients while they wait to be reduced."""
    import train

    found, update, sync = {"waiting": 0}, train.optimizer_step, fsdp2.FSDP2.gradient_sync

    def local(tensors) -> int:
        return sum(t.to_local().nbytes for t in tensors)

    @contextmanager
    def spied(self, module, last):
        with sync(self, module, last):
            yield
        if not last:
            units = [m for m in module.modules() if isinstance(m, torch.distributed.fsdp.FSDPModule)]
            params = [p for m in units for p in m._get_fsdp_state()._fsdp_param_group.fsdp_params]
            whole = [p._unsharded_param.grad for p in params if hasattr(p, "_unsharded_param")]
            found["waiting"] = sum(grad.nbytes for grad in whole if grad is not None)

    def spy(strategy, module, optimizer, *rest):
        found["weights"] = local(module.parameters())
        found["gradients"] = local(p.grad for p in module.parameters())
        result = update(strategy, module, optimizer, *rest)
        found["optimizer"] = local(v for state in optimizer.state.values() for v in state.values() if v.dim())
        return result

    train.optimizer_step, fsdp2.FSDP2.gradient_sync = spy, spied
    train.main([str(word) for word in argv])
    return found


@pytest.mark.parametrize("each", [True, False])
def test_the_arithmetic_gives_what_two_ranks_hold(files, tmp_path, each):
    flags = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_steps": 1}
    flags |= {"global_batch_size": 8, "per_device_batch_size": 2, "sync_each_batch": each, "max_length": 64}
    argv = kit.flags(**flags, output_dir=tmp_path / "run")
    where = kit.where("fsdp2", 2, mixed_precision="no")
    ranks = kit.spawn(2, _held, argv, out=tmp_path / "out", env=where)
    run, options = parsing.parse(argv, OPTIONS)
    n = memory_estimate.count(memory_command._model(run, options)[0])
    way = Strategy("FSDP2", "fsdp2", "FSDP", shards=2, low=False, each=each)
    waiting = 0 if each else 4 * n.parameters
    for rank in ranks:
        assert rank == memory_estimate.resting(n, run, way) | {"waiting": waiting}
    # The whole gradients that wait are part of what is at work; mutant: a replica's arithmetic.
    assert memory_estimate.passing(n, run, way) >= waiting
    assert memory_estimate.resting(n, run, Strategy("DDP", "ddp", "DDP", low=False)) != rank


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_activations_are_what_autograd_keeps(files, tmp_path, name):
    values = kit.LLAMA if name == "llama" else kit.GPT2 | {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    recipe = kit.write_yaml(tmp_path / "model.yaml", values)
    run, options = ready(model_config=recipe, per_device_batch_size=3)
    task = make_task(run, options)
    task.load()
    model = task.build().train()
    own, kept = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}, {}

    def keep(value):
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes(), value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        model.base_model(input_ids=torch.zeros(3, 64, dtype=torch.long), use_cache=False)
    real = sum(size for key, (size, _) in kept.items() if key not in own)
    assert memory_estimate._kept(model, 3, 64, torch.float32, False)[0] == real
    chunk = 3 * 64 * 500 * 16
    n, way = memory_estimate.count(model), Strategy("one", "cpu", low=False)
    counted = memory_estimate.activations(model, n, 64, run, way) - chunk
    assert counted == pytest.approx(real, rel=0.01)
    # Layers that are computed again keep their inputs and what one of them needs.
    again = memory_estimate.activations(model, n, 64, run, Strategy("one", "cpu", low=False, recompute=True)) - chunk
    assert again == 2 * 3 * 64 * 32 * 4 + counted / 2
    # Under autocast there are also copies of the weights, once. Mutant: three times what one row keeps.
    one, three = (memory_estimate._kept(model, rows, 64, torch.bfloat16, True)[0] for rows in (1, 3))
    assert three == one + 2 * memory_estimate._row(model, 64, torch.bfloat16, True)[0]
    assert three < 3 * one - 2 * 2 * n.layers * n.layer * 0.9


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_small_model_is_given_the_simplest_file(tmp_path, capsys):
    recipe = kit.write_yaml(tmp_path / "gpt2.yaml", {"model_type": "gpt2"})
    one = printed(capsys, model_config=recipe, gpus=1, gpu_memory=80)
    assert "124,439,808 parameters, 124,439,808 of them trained" in one
    assert "use accelerate_configs/gpu.yaml: the simplest" in one
    assert "use accelerate_configs/ddp.yaml: the simplest" in printed(
        capsys, model_config=recipe, gpus=8, gpu_memory=80
    )


def test_a_large_model_is_counted_without_its_memory_and_sharded(tmp_path, capsys):
    recipe = kit.write_yaml(tmp_path / "large.yaml", L70)
    flags = {"model_config": recipe, "max_length": 4096, "per_device_batch_size": 1, "gpu_memory": 80}
    text = printed(capsys, **flags, gpus=8)
    assert text.startswith("70,553,706,496 parameters")
    assert "use accelerate_configs/fsdp2_offload.yaml" in text
    row = re.search(r"^FSDP2 +(.*)$", text, re.MULTILINE)[1].split()
    shard = 4 * 70_553_706_496 / 8 / 2**30
    assert row[:3] == [f"{shard:.2f}", f"{shard:.2f}", f"{2 * shard:.2f}"]


def test_what_fits_nowhere_is_said(tmp_path, capsys):
    recipe = kit.write_yaml(tmp_path / "gpt2.yaml", {"model_type": "gpt2"})
    flags = {"model_config": recipe, "max_length": 1024, "per_device_batch_size": 8}
    text = printed(capsys, **flags, gpus=1, gpu_memory=6)
    assert "nothing fits" in text
    assert "on 2 such devices accelerate_configs/fsdp2" in text
    assert "with --gradient_checkpointing true accelerate_configs/gpu.yaml would" in text
    assert "use accelerate_configs" not in text
    assert "nothing fits" in printed(capsys, **flags, gpus=8, gpu_memory=0.5)


def test_a_fork_s_model_without_token_ids_is_counted_without_activations(files):
    run, _ = ready(model_config=files / "llama.yaml")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    n = memory_estimate.count(model)
    assert (n.parameters, n.layers, n.rest) == (20, 0, 20)
    assert memory_estimate.activations(model, n, 64, run, Strategy("one", "cpu")) is None
    assert memory_estimate.in_words(run, model, str, 64).endswith("activations come on top")


def _command(argv):
    import sys

    sys.argv = ["memory.py", *argv]
    run_main(memory_command.main)


@pytest.mark.parametrize("flags", [["--gpus", "0"], ["--gpu_memory", "much"], ["--gpus=-1"], ["--gpus"]])
def test_a_wrong_number_of_devices_is_refused(flags):
    with pytest.raises(UsageError, match=f"{flags[0].partition('=')[0]} .*: give a whole number of devices"):
        memory_command.main(flags)


def test_a_wrong_run_file_ends_with_one_sentence(tmp_path):
    with pytest.raises(kit.RankFailed) as failed:
        kit.spawn(1, _command, ["--model_config", "nowhere.yaml"], out=tmp_path / "out")
    assert failed.value.codes == [2]
    assert failed.value.texts[0].strip().startswith("error: nowhere.yaml: no such file")


# ---- the line of a run -----------------------------------------------------------------------------------------------


def test_a_dry_run_counts_for_the_strategy_of_its_launch(files, tmp_path):
    flags = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_steps": 1, "dry_run": True}
    where = kit.where("fsdp2", 2, mixed_precision="no")
    tmp_path = tmp_path / "here"
    tmp_path.mkdir()
    codes, texts = kit.run_command("train.py", *kit.flags(**flags), folder=tmp_path, world=2, env=where)
    assert codes == [0, 0], texts
    line = re.search(r"^  memory +(.*)$", texts[0], re.MULTILINE)[1]
    parameters = int(re.search(r"^  parameters +([\d,]+)", texts[0], re.MULTILINE)[1].replace(",", ""))
    assert line.startswith(f"{16 * parameters / 2 / 1024:.3g} KiB per device (FSDP2) for weights")
    assert "for copies at work; about" in line
    assert line.endswith("for activations")


def test_the_strategy_is_what_the_launcher_says(files, monkeypatch):
    run, _ = ready(model_config=files / "llama.yaml")
    kinds = {}
    for name in ("gpu", "ddp", "multi_node", "fsdp2", "fsdp2_offload", "hsdp", "zero2", "zero3", "zero3_offload"):
        world = 1 if name == "gpu" else 4
        for key, value in (kit.where(name, world) | {"WORLD_SIZE": str(world)}).items():
            monkeypatch.setenv(key, value)
        way = memory_estimate.strategy_here(run)
        kinds[name] = way.kind, way.shards, way.offload, way.low
        monkeypatch.undo()
    assert kinds == {
        "gpu": ("NO", 1, False, True),
        "ddp": ("DDP", 1, False, True),
        "multi_node": ("DDP", 1, False, True),
        "fsdp2": ("FSDP", 4, False, True),
        "fsdp2_offload": ("FSDP", 4, True, True),
        "hsdp": ("FSDP", 2, False, True),
        "zero2": ("ZERO2", 4, False, True),
        "zero3": ("ZERO3", 4, False, True),
        "zero3_offload": ("ZERO3", 4, True, True),
    }
    assert fsdp2.LOW_PRECISION.keys() <= set(memory_estimate.LOW)
