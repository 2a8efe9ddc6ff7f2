"""Compiled layers, recomputed activations and compressed gradients: what they do to the numbers."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from transformers import modeling_utils

import train
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.models import compile_and_recompute as compile_and_recompute_module
from engine.models.compile_and_recompute import compile_and_recompute, recomputing_layers, repeated_layers
from engine.models.varlen_attention import document_bounds
from engine.run.memory import describe_activations, input_bytes
from engine.run.model_with_loss import ModelWithLoss
from tests.helpers import backend_runs, kit

pytestmark = pytest.mark.cluster

COMPILE = torch.nn.Module.compile


def recipe(files, model="exact.yaml", **fields) -> list[str]:
    return backend_runs.recipe(files, model, **{"global_batch_size": 16, "max_steps": 6, "dtype": "float64"} | fields)


@pytest.fixture(scope="module")
def plain(files, tmp_path_factory):
    return kit.run_training(1, tmp_path_factory.mktemp("speed") / "plain", *recipe(files))


def _compiled(argv):
    """Train with Dynamo's own backend, which needs no C++ compiler."""
    torch.nn.Module.compile = lambda block, **options: COMPILE(block, backend="eager", **options)
    train.main([str(word) for word in argv])


def test_compiled_layers_compute_the_same_under_their_own_names(files, plain, tmp_path):
    argv = recipe(files, pad_to_multiple_of=32, save_steps=3, compile=True, output_dir=tmp_path / "run")
    kit.spawn(2, _compiled, argv, out=tmp_path / "out")
    run = kit.Run(tmp_path / "run")
    assert run.losses() == pytest.approx(plain.losses(), rel=1e-12)
    assert run.kind("eval")[0]["loss"] == pytest.approx(plain.kind("eval")[0]["loss"], rel=1e-12)
    assert 0 < run.kind("train")[-1]["graphs"] <= 4  # all layers share them
    assert "graphs" not in plain.kind("train")[0]
    for path in run.folder.rglob("*.safetensors"):
        assert not any("_orig_mod" in name for name in load_file(path))
    assert run.weights.keys() == plain.weights.keys()


def test_compiled_layers_and_norms_compute_the_same_on_fsdp2(files, fsdp2_alone, tmp_path):
    """Sharded on two ranks; compiled by Dynamo's own backend. The norm before the head is no FSDP group of its own."""
    argv = backend_runs.fsdp2_recipe(files, compile=True, pad_to_multiple_of=32, output_dir=tmp_path / "run")
    kit.spawn(2, _compiled, argv, env=backend_runs.where("fsdp2", 2), out=tmp_path / "out")
    run = kit.Run(tmp_path / "run")
    assert run.kind("train")[-1]["graphs"] > 0
    backend_runs.check_same_run(fsdp2_alone, run, rel=1e-5)


def _shapes(argv) -> tuple[list, set]:
    """Train; return how layers were compiled, and the shapes of their inputs in training."""
    options, shapes = [], set()

    def note_shape(block, inputs):
        if block.training:
            shapes.add(tuple(inputs[0].shape[:2]))

    def compiled(block, **settings):
        options.append(settings)
        block.register_forward_pre_hook(note_shape)
        COMPILE(block, backend="eager", **settings)

    torch.nn.Module.compile = compiled
    train.main([str(word) for word in argv])
    return options, shapes


def _rows(files, tmp_path, kind: str) -> dict:
    lengths = {"equal": [9] * 22, "packed": [3, 9, 5, 6] * 11, "ragged": range(4, 26)}[kind]
    rows = kit.write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": list(range(length))} for length in lengths])
    return {"train_file": rows, "validation_file": files / "validation.jsonl", "packing": kind == "packed"}


@pytest.mark.parametrize("kind", ["equal", "packed", "ragged"])
def test_shapes_that_repeat_are_compiled_once_each(files, tmp_path, kind):
    """Of rows of one width, not for any shape: those kernels are slower, and would stay after the end of an epoch."""
    argv = recipe(files, **_rows(files, tmp_path, kind), max_length=12, compile=True, output_dir=tmp_path / "run")
    [(options, shapes)] = kit.spawn(1, _shapes, argv, out=tmp_path / "out")
    assert {settings["dynamic"] for settings in options} == {None if kind == "ragged" else False}
    if kind == "ragged":
        return
    assert {width for _, width in shapes} == {9 if kind == "equal" else 12}
    lines = kit.Run(tmp_path / "run").kind("train")
    assert lines[-1]["graphs"] - lines[0]["graphs"] == len(shapes) - 1 == 1  # full ones, and the last one of an epoch


def _compiled_modules(model_config, train_file) -> tuple[set[str], set[str], bool]:
    """Return the names of compiled layers, those of other compiled modules, and whether the logits are as before."""
    torch.nn.Module.compile = lambda block, **options: COMPILE(block, backend="eager", **options)
    task, _ = kit.open_data(model_config=model_config, train_file=train_file, dtype="float64")
    model, ids = task.build().eval(), torch.arange(12)[None]
    expected = model(input_ids=ids).logits
    layers = repeated_layers(compile_and_recompute(model, RunConfig(compile=True)))
    compiled = {name: module for name, module in model.named_modules() if module._compiled_call_impl is not None}
    of_layers = {name for name, module in compiled.items() if module in layers}
    same = torch.allclose(model(input_ids=ids).logits, expected, rtol=1e-12, atol=0)
    return of_layers, compiled.keys() - of_layers, same


@pytest.mark.parametrize(
    "config, layers, norms", [("llama", "model.layers", {"model.norm"}), ("gpt2", "transformer.h", set())]
)
def test_norms_outside_of_the_layers_are_compiled(files, tmp_path, config, layers, norms):
    """Those in a layer are compiled with it, and torch's own, those of GPT-2, are one kernel already."""
    arguments = (files / f"{config}.yaml", files / "train.jsonl")
    [found] = kit.spawn(1, _compiled_modules, *arguments, out=tmp_path / "out")
    assert found == ({f"{layers}.0", f"{layers}.1"}, norms, True)


LENGTHS = {"sequence_length_warmup_steps": 9, "sequence_length_warmup_start": 2, "max_length": 20}
BATCHES = {"batch_size_warmup_steps": 10, "batch_size_warmup_start": 1, "per_device_batch_size": 16}
BUDGET = {"packing": True, "per_device_batch_tokens": 30, "per_device_batch_size": None, "max_length": 12}


@pytest.mark.parametrize("fields", [LENGTHS, BATCHES, BUDGET])
def test_many_sizes_of_rows_of_one_width_are_compiled_once(files, tmp_path, fields):
    """Compiled one by one, torch would stop before it meets the shapes of all steps after a warmup. And packed rows are
    not padded beyond a budget of tokens."""
    if "packing" not in fields:
        kit.need_addon("data/size_warmups")
    length = 7 if "packing" in fields else 20  # one document in a packed row
    rows = kit.write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": list(range(length))}] * 200)
    data = {"train_file": rows, "validation_file": files / "validation.jsonl", "max_length": 20}
    argv = recipe(files, **data | {"max_steps": 12} | fields, compile=True, output_dir=tmp_path / "run")
    [(options, shapes)] = kit.spawn(1, _shapes, argv, out=tmp_path / "out")
    assert {settings["dynamic"] for settings in options} == {None}
    assert "packing" in fields or len(shapes) > 8  # torch's limit
    assert kit.Run(tmp_path / "run").kind("train")[-1]["graphs"] <= 4
    if "packing" in fields:
        assert {width for _, width in shapes} == {length}


class Shift(torch.nn.Module):
    def forward(self, x, bounds):
        return x + bounds.sum()


@pytest.mark.parametrize("marked", [True, False])
def test_layers_take_any_number_of_documents(marked):
    """Also if each shape is compiled for itself. The mutant, bounds that are not marked, meets torch's limit."""
    torch.compiler.reset()  # graphs of the other case
    layer, graphs = Shift(), []
    COMPILE(layer, backend=lambda graph, inputs: graphs.append(graph) or graph.forward, dynamic=False)
    for documents in range(16, 192, 16):
        bounds = document_bounds(torch.ones(documents, dtype=torch.int32), documents)["cu_seq_lens_q"]
        layer(torch.ones(2), bounds if marked else bounds.clone())
    assert len(graphs) == (1 if marked else 8)


def test_activations_are_recomputed(files):
    task, splits = kit.open_data(model_config=files / "gpt2.yaml", train_file=files / "train.jsonl")
    model, calls = compile_and_recompute(task.build(), RunConfig(gradient_checkpointing=True)).train(), []
    model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    ModelWithLoss(model, task)(task.collate(splits["train"].rows(range(8)), True).inputs)["loss"].backward()
    assert len(calls) == 2


def test_recomputation_has_the_same_dropout_under_ddp_with_accumulation(files, tmp_path):
    """A recomputed forward pass draws the same masks again."""
    flags = recipe(files, "gpt2.yaml")
    kept = kit.run_training(1, tmp_path / "kept", *flags)
    run = kit.run_training(2, tmp_path / "run", *flags, "--gradient_checkpointing", "true")
    assert run.losses() == pytest.approx(kept.losses(), rel=1e-12)
    assert kit.distance(run.weights, kept.weights) <= 1e-10


def _offload_without_an_accelerator() -> list:
    """Let this process offload as on a GPU, but to memory that is not pinned; return a list with an item a call."""
    calls, save_on_cpu = [], torch.autograd.graph.save_on_cpu
    modeling_utils.save_on_cpu = lambda **_: calls.append(1) or save_on_cpu()
    compile_and_recompute_module.has_device_memory = lambda: True
    return calls


def _offloaded(argv) -> int:
    """Train; return how many layers were offloaded."""
    calls = _offload_without_an_accelerator()
    train.main([str(word) for word in argv])
    return len(calls)


GRADES = [{"every_n_layers": 2}, {"offload": True}, {"every_n_layers": 2, "offload": True}]


@pytest.mark.parametrize("name, world, grades", [(None, 1, GRADES), (None, 2, GRADES[2:]), ("fsdp2", 2, GRADES[2:])])
def test_every_grade_of_recomputation_leaves_all_bits(files, tmp_path, name, world, grades):
    """With dropout, and a resume that changes the grade."""
    flags = recipe(files, "gpt2.yaml", save_steps=3)
    env = backend_runs.where(name, world) if name else None
    kept = kit.run_training(world, tmp_path / "kept", *flags, env=env)
    for number, grade in enumerate(grades):
        folder = tmp_path / f"run{number}"
        argv = [*flags, "--gradient_checkpointing", json.dumps(grade), "--output_dir", folder]
        calls = kit.spawn(world, _offloaded, argv, out=tmp_path / f"out{number}", env=env)
        assert all(calls) == bool(grade.get("offload"))
        assert kit.Run(folder).losses() == kept.losses()
        assert kit.same(kit.Run(folder).weights, kept.weights)
    folder = kit.rewind(folder, 3)
    assert kit.same(kit.run_training(world, folder, *flags, env=env).weights, kept.weights)


def _layer_calls(model, task, rows) -> list[int]:
    """Train on `rows`; return how often each layer is computed."""
    calls = [0] * len(model.transformer.h)
    for number, layer in enumerate(model.transformer.h):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    ModelWithLoss(model, task)(task.collate(rows, True).inputs)["loss"].backward()
    return calls


@pytest.mark.parametrize(
    "grade, calls",
    [
        ({}, [2, 2, 2]),
        ({"offload": True}, [2, 2, 2]),
        ({"every_n_layers": 2}, [2, 1, 2]),
        ({"every_n_layers": 4}, [2, 1, 1]),
    ],
)
def test_grade_says_which_layers_are_recomputed_and_what_waits_on_the_host(files, tmp_path, monkeypatch, grade, calls):
    three = kit.write_yaml(tmp_path / "three.yaml", {**yaml.safe_load((files / "gpt2.yaml").read_text()), "n_layer": 3})
    task, splits = kit.open_data(model_config=three, train_file=files / "train.jsonl")
    cfg = RunConfig(gradient_checkpointing=grade, per_device_batch_size=8)
    for module, name in ((modeling_utils, "save_on_cpu"), (compile_and_recompute_module, "has_device_memory")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored at the end
    moved = _offload_without_an_accelerator()
    model = compile_and_recompute(task.build(), cfg).train()
    inputs = []
    for layer in recomputing_layers(model):
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0].nbytes))
    rows = [splits["train"].rows([0])[0]] * 8
    longest = len(rows[0]["input_ids"])
    assert _layer_calls(model, task, rows) == calls
    assert len(inputs) == calls.count(2)
    assert len(moved) == (3 if grade.get("offload") else 0)
    assert sum(inputs) == calls.count(2) * input_bytes(cfg, model, longest)
    text = describe_activations(cfg, model, str, longest)
    assert f"the inputs of {calls.count(2)} of 3 layers" in text
    assert f"(up to {sum(inputs)})" in text
    assert ("in host memory" in text) == bool(grade.get("offload"))


class PlainModel(torch.nn.Linear):
    supports_gradient_checkpointing = True

    def activation_checkpointing_enable(self, arguments):
        self.is_recomputed = True


def test_offload_on_a_cpu_is_ignored_with_a_warning(files, capsys):
    task, _ = kit.open_data(model_config=files / "gpt2.yaml", train_file=files / "train.jsonl")
    compile_and_recompute(task.build(), RunConfig(gradient_checkpointing={"offload": True}))
    assert ("offload is ignored" in capsys.readouterr().err) == (not torch.accelerator.is_available())


def test_model_that_would_ignore_the_mapping_is_refused():
    model = PlainModel(2, 2)
    with pytest.raises(UsageError, match=r"gradient_checkpointing: PlainModel .* every_n_layers and offload"):
        compile_and_recompute(model, RunConfig(gradient_checkpointing={"every_n_layers": 2}))
    assert not hasattr(model, "is_recomputed")
    assert compile_and_recompute(model, RunConfig(gradient_checkpointing=True)).is_recomputed
    with pytest.raises(UsageError, match="gradient_checkpointing: Linear"):
        compile_and_recompute(torch.nn.Linear(2, 2), RunConfig(gradient_checkpointing={}))


def _compiled_and_offloaded(argv) -> int:
    calls = _offload_without_an_accelerator()
    _compiled(argv)
    return len(calls)


def test_compiled_layers_take_every_grade(files, plain, tmp_path):
    grade = json.dumps(GRADES[2])
    argv = recipe(files, pad_to_multiple_of=32, compile=True, gradient_checkpointing=grade, output_dir=tmp_path / "run")
    assert kit.spawn(1, _compiled_and_offloaded, argv, out=tmp_path / "out")[0]
    assert kit.Run(tmp_path / "run").losses() == pytest.approx(plain.losses(), rel=1e-12)


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
    argv = recipe(files, ddp_comm_hook="fp16", dtype="float32", output_dir=tmp_path / "run")
    counts = kit.spawn(2, _hooked, argv, out=tmp_path / "out")
    assert counts == [6, 6]  # one bucket, six steps of two micro-batches a rank
    # Other random weights: those of float32.
    assert kit.Run(tmp_path / "run").losses() == pytest.approx(plain.losses(), rel=1e-2)
