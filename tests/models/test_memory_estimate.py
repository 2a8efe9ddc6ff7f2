"""What fits where: the counted model is the real one, and the arithmetic gives the bytes that two ranks really hold."""

import re
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from src.config import parsing
from src.config.errors import UsageError
from src.distributed import fsdp2
from src.models import activation_memory, memory_estimate
from src.models.activation_memory import Forward
from src.models.memory_estimate import StrategySettings, count_parameters, resting_bytes, working_bytes
from src.reporting import memory_command
from src.tasks import OPTIONS, make_task
from tests.helpers import kit

pytestmark = pytest.mark.cluster

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def parse(**fields):
    """Return (cfg, options) as the command gets them."""
    return parsing.parse(kit.flags(**{"train_file": "-", "max_length": 64} | fields), OPTIONS)


def real_model(cfg, options):
    task = make_task(cfg, options)
    task.load()
    return task.build().train()


def printed(capsys, **fields) -> str:
    memory_command.main(kit.flags(**fields))
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # the second ties its embeddings
def test_parameters_are_those_of_the_real_model(files, name):
    cfg, options = parse(model_config=files / f"{name}.yaml")
    empty, _ = memory_command.empty_model(cfg, options)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    model = real_model(cfg, options)
    size = count_parameters(empty)
    assert size == count_parameters(model)
    assert size.parameters == sum(p.numel() for p in model.parameters()) == size.rest + 2 * size.layer
    assert size.layers == 2
    for p in list(model.parameters())[1:]:
        p.requires_grad = False
    assert count_parameters(model).trained == next(model.parameters()).numel()


def _held_bytes(argv):
    """Train a step; return what this rank holds at its end, and whole gradients while they wait to be reduced."""
    import train

    held, optimizer_step, gradient_sync = {"waiting": 0}, train.optimizer_step, fsdp2.FSDP2.gradient_sync

    def local(tensors) -> int:
        return sum(tensor.to_local().nbytes for tensor in tensors)

    @contextmanager
    def spied_sync(self, module, last):
        with gradient_sync(self, module, last):
            yield
        if not last:
            units = [m for m in module.modules() if isinstance(m, torch.distributed.fsdp.FSDPModule)]
            params = [p for m in units for p in m._get_fsdp_state()._fsdp_param_group.fsdp_params]
            whole = [p._unsharded_param.grad for p in params if hasattr(p, "_unsharded_param")]
            held["waiting"] = sum(grad.nbytes for grad in whole if grad is not None)

    def spied_step(strategy, module, optimizer, *rest):
        held["weights"] = local(module.parameters())
        held["gradients"] = local(p.grad for p in module.parameters())
        result = optimizer_step(strategy, module, optimizer, *rest)
        held["optimizer"] = local(v for state in optimizer.state.values() for v in state.values() if v.dim())
        return result

    train.optimizer_step, fsdp2.FSDP2.gradient_sync = spied_step, spied_sync
    train.main([str(word) for word in argv])
    return held


def test_copies_of_techniques_are_counted():
    size = memory_estimate.ModelSize(1000, 100, 0, 0, 0, 0, 0, 0)
    for dtype, width in (("bfloat16", 4), ("float32", 4), ("float64", 8)):
        cfg, settings = parsing.RunConfig(dtype=dtype), StrategySettings("FSDP2", kind="FSDP", shards=2)
        more, less = (resting_bytes(size, cfg, settings, copies) for copies in (3, 0))
        assert {name: more[name] - less[name] for name in more} == {
            "weights": 3 * width * 100 / 2,
            "gradients": 0,
            "optimizer": 0,
        }


@pytest.mark.parametrize("often", [True, False])
def test_arithmetic_gives_what_two_ranks_hold(files, tmp_path, often):
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_steps": 1}
    fields |= {"global_batch_size": 8, "per_device_batch_size": 2, "sync_each_batch": often, "max_length": 64}
    argv = kit.flags(**fields, output_dir=tmp_path / "run")
    env = kit.where("fsdp2", 2, mixed_precision="no")
    ranks = kit.spawn(2, _held_bytes, argv, out=tmp_path / "out", env=env)
    cfg, options = parsing.parse(argv, OPTIONS)
    size = count_parameters(memory_command.empty_model(cfg, options)[0])
    settings = StrategySettings("FSDP2", kind="FSDP", shards=2, low_precision=False, reduce_often=often)
    waiting = 0 if often else 4 * size.parameters
    assert ranks == [resting_bytes(size, cfg, settings) | {"waiting": waiting}] * 2
    assert working_bytes(size, cfg, settings) >= waiting
    # The mutant: the arithmetic of a replica.
    assert resting_bytes(size, cfg, StrategySettings("DDP", kind="DDP", low_precision=False)) != ranks[0]


def saved_bytes(model, forward) -> int:
    """Return the bytes that autograd really saves in `forward()`, except the model's own tensors."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(size for key, (size, _) in saved.items() if key not in own)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_activations_are_what_autograd_saves(tmp_path, name):
    values = kit.LLAMA if name == "llama" else kit.GPT2 | {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    cfg, options = parse(model_config=kit.write_yaml(tmp_path / "model.yaml", values))
    task = make_task(cfg, options)
    task.load()
    model = task.build().train()
    row = {"input_ids": np.arange(64), "bytes": 64}
    forward = Forward(model, task.loss, lambda rows: task.collate([row] * rows, True).inputs)
    ids = torch.zeros(3, 64, dtype=torch.long)
    real = saved_bytes(model, lambda: model.base_model(input_ids=ids, use_cache=False))
    real += 3 * 64 * 32 * 4  # the input of the head; its logits are made in chunks
    measured = activation_memory.measure(forward, forward.inputs(3), torch.float32, False)
    assert (measured.saved, measured.layer_input) == (real, 3 * 64 * 32 * 4)
    logits = 3 * 64 * 500 * 16
    estimate = activation_memory.activation_bytes(forward, 3, torch.float32, False) - logits
    assert estimate == pytest.approx(real, rel=0.01)
    # The memory command has no rows; it finds the same.
    invented = activation_memory.forward_without_rows(model, 64)
    assert activation_memory.activation_bytes(invented, 3, torch.float32, False) - logits == pytest.approx(
        real, rel=0.01
    )
    # Recomputed layers keep their inputs, and one of them all that it needs.
    recomputed = activation_memory.activation_bytes(forward, 3, torch.float32, False, recomputed_layers=2) - logits
    assert recomputed == 2 * 3 * 64 * 32 * 4 + estimate / 2
    # Autocast also copies the weights, once. The mutant: three times what one row keeps.
    one, two, three = (
        activation_memory.measure(forward, forward.inputs(n), torch.bfloat16, True).saved for n in (1, 2, 3)
    )
    assert three == one + 2 * (two - one)
    size = count_parameters(model)
    assert three < 3 * one - 2 * 2 * size.layers * size.layer * 0.9


class Picture(torch.nn.Module):
    """A plain module without token ids, layer classes or a configuration; BatchNorm needs more than one row."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, image):
        return self.head(self.norm(self.convolution(image).relu().mean((2, 3))))


def test_any_loss_of_any_module_is_measured(files):
    cfg, _ = parse(model_config=files / "llama.yaml")
    model = Picture()
    steps = model.norm.num_batches_tracked.clone()

    def inputs(rows):
        return {"image": torch.rand(rows, 3, 16, 16), "label": torch.zeros(rows, dtype=torch.long)}

    def loss(model, inputs):
        return {"loss": torch.nn.functional.cross_entropy(model(inputs["image"]), inputs["label"], reduction="sum")}

    size = count_parameters(model)
    assert (size.parameters, size.layers, size.rest) == (258, 0, 258)
    forward = Forward(model, loss, inputs)
    kept = memory_estimate.activations(forward, size, 64, cfg, StrategySettings("one", low_precision=False))
    batch = inputs(cfg.per_device_batch_size)
    assert kept == pytest.approx(saved_bytes(model, lambda: loss(model, batch)), rel=0.01)
    assert model.norm.num_batches_tracked == steps + 1  # the real pass, and nothing of the measured ones
    assert "for activations" in memory_estimate.describe_memory(cfg, model, str, forward, 64)
    model.eval()
    activation_memory.measure(forward, inputs(2), torch.float32, False)
    assert not model.training
    assert not model.norm.training


def test_loss_that_reads_values_has_no_activations(files):
    cfg, _ = parse(model_config=files / "llama.yaml")
    model = torch.nn.Linear(4, 4)

    def loss(model, inputs):
        return {"loss": model(inputs["x"]) * inputs["x"].sum().item()}

    forward = Forward(model, loss, lambda rows: {"x": torch.ones(rows, 4)})
    assert memory_estimate.activations(forward, count_parameters(model), 64, cfg, StrategySettings("one")) is None
    assert "plus activations" in memory_estimate.describe_memory(cfg, model, str, forward, 64)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_simplest_file_that_fits_is_named(tmp_path, capsys):
    fields = {"model_config": kit.write_yaml(tmp_path / "gpt2.yaml", {"model_type": "gpt2"}), "gpu_memory": 80}
    for gpus, file in ((1, "gpu"), (8, "ddp")):
        text = printed(capsys, **fields, gpus=gpus)
        assert "124,439,808 parameters (124,439,808 trainable)" in text
        assert f"use accelerate_configs/{file}.yaml: the simplest" in text
    text = printed(capsys, **fields | {"gpu_memory": 0.5}, gpus=8)
    assert "nothing fits" in text
    assert "use accelerate_configs" not in text


def test_large_model_is_counted_without_its_memory(tmp_path, capsys):
    file = kit.write_yaml(tmp_path / "large.yaml", LLAMA_70B)
    text = printed(capsys, model_config=file, max_length=4096, per_device_batch_size=1, gpu_memory=80, gpus=8)
    assert text.startswith("70,553,706,496 parameters")
    assert "use accelerate_configs/fsdp2_offload.yaml" in text
    row = re.search(r"^FSDP2 +(.*)$", text, re.MULTILINE)[1].split()
    shard = 4 * 70_553_706_496 / 8 / 2**30
    assert row[:3] == [f"{shard:.2f}", f"{shard:.2f}", f"{2 * shard:.2f}"]


@pytest.mark.parametrize("flags", [["--gpus", "0"], ["--gpu_memory", "much"], ["--gpus=-1"], ["--gpus"]])
def test_wrong_number_of_devices_is_refused(flags):
    with pytest.raises(UsageError, match=flags[0].partition("=")[0].removeprefix("--")):
        memory_command.main(flags)


def test_wrong_run_file_is_refused():
    with pytest.raises(UsageError, match=r"nowhere\.yaml: no such file"):
        memory_command.main(["--model_config", "nowhere.yaml"])


# ---- the line of a run -----------------------------------------------------------------------------------------------


def test_dry_run_counts_for_the_strategy_of_its_launch(files, tmp_path):
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_steps": 1}
    env = kit.where("fsdp2", 2, mixed_precision="no")
    argv = kit.flags(**fields, dry_run=True)
    (tmp_path / "here").mkdir()
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=2, env=env)
    assert codes == [0, 0], texts
    line = re.search(r"^  memory +(.*)$", texts[0], re.MULTILINE)[1]
    parameters = int(re.search(r"^  parameters +([\d,]+)", texts[0], re.MULTILINE)[1].replace(",", ""))
    assert line.startswith(f"{16 * parameters / 2 / 1024:.3g} KiB per device (FSDP2)")
    assert "for temporary copies; about" in line
    assert line.endswith("for activations")


LAUNCHES = {  # accelerate file -> kind, shards, offload
    "gpu": ("NO", 1, False),
    "ddp": ("DDP", 1, False),
    "multi_node": ("DDP", 1, False),
    "fsdp2": ("FSDP", 4, False),
    "fsdp2_offload": ("FSDP", 4, True),
    "hsdp": ("FSDP", 2, False),
    "zero2": ("ZERO2", 4, False),
    "zero3": ("ZERO3", 4, False),
    "zero3_offload": ("ZERO3", 4, True),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_strategy_is_that_of_the_launcher(files, monkeypatch, name):
    cfg, _ = parse(model_config=files / "llama.yaml")
    world = 1 if name == "gpu" else 4
    for key, value in (kit.where(name, world) | {"WORLD_SIZE": str(world)}).items():
        monkeypatch.setenv(key, value)
    settings = memory_estimate.strategy_of_launch(cfg)
    assert (settings.kind, settings.shards, settings.offload) == LAUNCHES[name]
    assert settings.low_precision
    assert fsdp2.LOW_PRECISION.keys() <= set(memory_estimate.LOW_PRECISION)
