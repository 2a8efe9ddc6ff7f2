"""Compiled layers, recomputed activations, padding and compressed gradients: what they do to the numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import train
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.models import compile_and_recompute
from src.training.step import ModelWithLoss
from tests.helpers import kit

pytestmark = pytest.mark.cluster

COMPILE = torch.nn.Module.compile


def recipe(files, **fields) -> list[str]:
    values = {"model_config": files / "exact.yaml", "validation_file": files / "validation.jsonl"}
    values |= {"train_file": files / "train.jsonl", "global_batch_size": 16, "per_device_batch_size": 4}
    values |= {"max_steps": 6, "logging_steps": 1, "learning_rate": 3e-3, "dtype": "float64"}
    return kit.flags(**values | fields)


@pytest.fixture(scope="module")
def plain(files, tmp_path_factory):
    return kit.run_training(1, tmp_path_factory.mktemp("speed") / "plain", *recipe(files))


def losses_equal(run, plain, bound: float) -> bool:
    pairs = zip(run.losses(), plain.losses(), strict=True)
    return all(one == pytest.approx(other, rel=bound) for one, other in pairs)


# ---- torch.compile -----------------------------------------------------------------------------------------------------


def _compiled(argv):
    """Train with Dynamo's own backend, which needs no C++ compiler."""
    torch.nn.Module.compile = lambda block: COMPILE(block, backend="eager")
    train.main([str(word) for word in argv])


def compiled(world: int, folder, flags) -> kit.Run:
    argv = [*flags, "--compile", "true", "--output_dir", folder]
    kit.spawn(world, _compiled, argv, out=folder.with_suffix(".out"))
    return kit.Run(folder)


def test_compiled_layers_compute_the_same_under_their_own_names(files, plain, tmp_path):
    run = compiled(2, tmp_path / "run", recipe(files, pad_to_multiple_of=32, save_steps=3))
    assert losses_equal(run, plain, 1e-12)
    assert run.kind("eval")[0]["loss"] == pytest.approx(plain.kind("eval")[0]["loss"], rel=1e-12)
    graphs = [line["graphs"] for line in run.kind("train")]
    assert 0 < graphs[-1] <= 4  # all layers share them
    for path in run.folder.rglob("*.safetensors"):
        assert not any("_orig_mod" in name for name in load_file(path))
    assert run.weights.keys() == plain.weights.keys()
    assert "graphs" not in plain.kind("train")[0]


def test_compiled_layers_keep_parameter_names(files):
    """The mutant is `torch.compile(model)`, as most scripts have it."""
    task, _ = kit.open_data(model_config=files / "llama.yaml", train_file=files / "train.jsonl")
    model = task.build()
    names = list(model.state_dict())
    cfg = RunConfig(compile=True)
    assert list(compile_and_recompute.compile_and_recompute(model, cfg, torch.device("cpu")).state_dict()) == names
    layers = compile_and_recompute.repeated_layers(model)
    assert len(layers) == kit.LLAMA["num_hidden_layers"]
    assert all(layer._compiled_call_impl is not None for layer in layers)
    assert all(name.startswith("_orig_mod.") for name in torch.compile(model).state_dict())


def test_many_graphs_are_warned_about_once(monkeypatch, capsys):
    from torch._dynamo import config, utils

    graphs = compile_and_recompute.CompileCounter(RunConfig(compile=True))
    of_losses = compile_and_recompute.CompiledOnAccelerators.count  # each takes any number of rows
    monkeypatch.setitem(utils.counters["stats"], "unique_graphs", of_losses + config.recompile_limit - 1)
    assert graphs.line() == {"graphs": config.recompile_limit - 1}
    assert "graphs" not in capsys.readouterr().err
    utils.counters["stats"]["unique_graphs"] += 1
    assert graphs.line() == graphs.line() == {"graphs": config.recompile_limit}
    assert capsys.readouterr().err.count("--pad_to_multiple_of") == 1
    assert compile_and_recompute.CompileCounter(RunConfig()).line() == {}


# ---- activations -------------------------------------------------------------------------------------------------------


def _kept(files, checkpointed: bool) -> tuple[int, list]:
    """Return the bytes that a forward pass keeps for backward, and the gradients, of a model with dropout."""
    from src.data.data_loader import seed_everything

    fields = {"gradient_checkpointing": checkpointed, "dtype": "float64"}
    task, splits = kit.open_data(model_config=files / "gpt2.yaml", train_file=files / "train.jsonl", **fields)
    model = compile_and_recompute.compile_and_recompute(
        task.build(), RunConfig(gradient_checkpointing=checkpointed), torch.device("cpu")
    )
    model_with_loss, kept = ModelWithLoss(model, task).train(), {}
    inputs = task.collate(splits["train"].rows(range(8)), True).inputs
    seed_everything(3)

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model_with_loss(inputs)["loss"]
    held = sum(kept.values())
    loss.backward()
    return held, [parameter.grad.clone() for parameter in model.parameters()]


def test_recomputed_activations_are_not_kept_and_dropout_is_the_same(files):
    whole, gradients = _kept(files, False)
    less, same = _kept(files, True)
    assert less < whole / 2
    assert all(torch.equal(one, other) for one, other in zip(gradients, same, strict=True))


def test_checkpointing_works_under_ddp_with_accumulation(files, plain, tmp_path):
    """The reentrant form would reduce gradients twice."""
    run = kit.run_training(2, tmp_path / "run", *recipe(files, gradient_checkpointing=True))
    assert losses_equal(run, plain, 1e-12)
    assert kit.distance(run.weights, plain.weights) <= 1e-10


def test_model_without_checkpointing_is_refused():
    with pytest.raises(UsageError, match=r"gradient_checkpointing is true, but Linear"):
        compile_and_recompute.compile_and_recompute(
            torch.nn.Linear(1, 1), RunConfig(gradient_checkpointing=True), torch.device("cpu")
        )


# ---- width -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths, multiple, most, expected",
    [
        ([3, 7], None, 64, 7),
        ([3, 7], 8, 64, 8),
        ([8], 8, 64, 8),
        ([61], 8, 62, 62),
        ([0], None, 9, 1),
        ([70], 8, 64, 70),
    ],
)
def test_padded_length(lengths, multiple, most, expected):
    from src.tasks.base import padded_length

    assert padded_length(lengths, multiple, most) == expected


def test_pad_to_multiple_of_changes_only_the_padding(files, plain, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *recipe(files, pad_to_multiple_of=32))
    assert losses_equal(run, plain, 1e-12)
    assert run.kind("train")[-1]["padding"] > plain.kind("train")[-1]["padding"]


# ---- what DDP sends ----------------------------------------------------------------------------------------------------


def _hooked(argv) -> int:
    """Train; return how many gradient buckets went through the hook that rounds to 16 bits."""
    count, original = [0], default_hooks.fp16_compress_hook

    def counted(group, bucket):
        count[0] += 1
        return original(group, bucket)

    default_hooks.fp16_compress_hook = counted
    train.main([str(word) for word in argv])
    return count[0]


def test_a_comm_hook_rounds_gradients_once_a_step(files, plain, tmp_path):
    argv = [*recipe(files, ddp_comm_hook="fp16", dtype="float32"), "--output_dir", tmp_path / "run"]
    counts = kit.spawn(2, _hooked, argv, out=tmp_path / "out")
    assert counts == [6, 6]  # one bucket, six steps of two micro-batches a rank
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = [line["loss"] for line in lines if line["kind"] == "train"]
    assert first == pytest.approx(plain.losses(), rel=1e-2)  # other random weights: those of float32
