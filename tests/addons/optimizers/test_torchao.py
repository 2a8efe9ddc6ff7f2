"""The package torchao: names, the same update bit for bit, one compilation, killed and resumed runs, memory."""

import json
import sys
from functools import partial

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from engine.checkpointing.tensor_files import TensorReader, write_tensors
from engine.config import optimizer_class
from engine.config.errors import UsageError
from engine.config.optimizer_class import find_optimizer
from engine.config.run_config import RunConfig
from engine.distributed import optimizer_state
from engine.distributed.sharded_tensors import gather_full
from engine.models.build_model import weight_dtype
from engine.process import private_apis
from engine.run.memory import moment_bytes
from src.training.optimizers import make_optimizer
from tests.helpers import kit, technique_runs
from tests.helpers.killing import train_until_killed

ao = pytest.importorskip("torchao.optim")
pytestmark = pytest.mark.cluster  # with the other extra packages

KINDS = {"adamw_8bit": ao.AdamW8bit, "adamw_4bit": ao.AdamW4bit, "adamw_fp8": ao.AdamWFp8}
WIDE = kit.EXACT | {"vocab_size": 50, "n_embd": 64, "n_layer": 1, "n_positions": 32}
# Trains one matrix of 64 rows of 256 values, and its bias: each shape is compiled, which takes seconds.
FROZEN = ["*.wte.*", "*.wpe.*", "*.ln_*", "*.attn.*", "*.mlp.c_proj.*"]
MATRIX = "transformer.h.0.mlp.c_fc.weight"


def fields(folder, optim: str = "adamw_8bit", **more) -> dict:
    """Return the fields of a run of seven steps with a schedule that changes the rate in each."""
    values = technique_runs.files(folder) | {"model_config": kit.write_yaml(folder / "wide.yaml", WIDE)}
    values |= {"dtype": "float32", "optim": optim, "adam_beta2": 0.95, "freeze": FROZEN, "max_steps": 7}
    return values | {"lr_scheduler_type": "linear", "warmup_steps": 2} | more


# ---- names and arguments -------------------------------------------------------------------------------------------------


def test_names_of_the_package_are_found():
    for name in (*KINDS, "AdamW8bit", "torchao/adamw_fp8", "adam_4bit"):
        kind, addon = find_optimizer(name)
        assert addon.__name__ == "addons.optimizers.torchao"
        assert issubclass(kind, getattr(ao, kind.__name__))


@pytest.mark.parametrize(
    "name, right",
    [
        ("adamw_torch_8bit", "adamw8bit"),
        ("adamw_bnb_8bit", "adamw8bit"),
        ("paged_adamw_8bit", "adamw8bit"),
        ("adamw_torch_4bit", "adamw4bit"),
        ("ao_adamw_fp8", "adamwfp8"),
        ("adamw_9bit", "adamw"),
    ],
)
def test_names_of_other_trainers_get_the_right_one(name, right):
    with pytest.raises(UsageError, match=f"optim is {name}: .*did you mean {right}"):
        find_optimizer(name)


def test_missing_package_is_one_sentence(monkeypatch):
    from addons.optimizers import torchao

    monkeypatch.setitem(sys.modules, "torchao", None)
    torchao.classes.cache_clear()
    with pytest.raises(UsageError, match=r"optim is adamw_8bit: .*\.venv/bin/pip install torchao==\d"):
        find_optimizer("adamw_8bit")
    torchao.classes.cache_clear()


@pytest.mark.parametrize(
    "given, text",
    [
        ({"optim_args": {"betas": [0.9, 0.95]}}, "betas is set by adam_beta1 and adam_beta2"),
        ({"optim_args": {"block_size": 33}}, "block_size is 33: give an even number"),
        ({"optim_args": {"amsgrad": True}}, "amsgrad does not work with quantized moments"),
        ({"optim_args": {"bf16_stochastic_round": True}}, "bf16_stochastic_round is for dtype: bfloat16"),
    ],
)
def test_arguments_that_cannot_work_are_refused(given, text):
    [error] = optimizer_class.optimizer_errors(RunConfig(optim="adamw_8bit", **given))
    assert text in error


# ---- the update ----------------------------------------------------------------------------------------------------------


def gradients(model: torch.nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return Conv1D(256, 64)  # the shapes that the runs below train, so that they find the compiled code on the disk


@pytest.mark.parametrize("optim", KINDS)
def test_update_is_that_of_the_package_and_compiled_once(tmp_path, optim):
    """Bitwise for five steps with a rate that changes, groups, and a state that is saved and loaded after two of them."""
    cfg = RunConfig(optim=optim, adam_beta2=0.95, weight_decay=0.1, parameter_groups={"weight": {"lr_factor": 0.5}})
    ours, theirs = small_model(), small_model()
    groups = [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}]
    reference = KINDS[optim](groups, betas=(0.9, 0.95))
    optimizer = make_optimizer(cfg, ours)
    graphs = []
    for step in range(5):
        if step == 2:
            save(tmp_path, ours, optimizer)
            optimizer = make_optimizer(cfg, ours)
            restore(tmp_path, ours, optimizer)
        rate = 0.01 / (step + 1)
        for group, factor, other in zip(optimizer.param_groups, (0.5, 1.0), reference.param_groups, strict=True):
            group["lr"] = rate * factor
            other["lr"].fill_(rate * factor)
        for model, each in ((theirs, reference), (ours, optimizer)):
            gradients(model, step)
            each.step()
        graphs.append(private_apis.count_compiled_graphs())
        assert kit.same(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    assert len(set(graphs)) == 1
    optimizer.param_groups[0]["betas"] = (0.8, 0.95)
    with pytest.raises(UsageError, match="something changes them while training"):  # it would compile in each step
        optimizer.step()


def save(folder, model, optimizer) -> dict[str, torch.Tensor]:
    """Write the state of the optimizer as a checkpoint does; return its tensors."""
    flat = optimizer_state.flatten(model, optimizer)
    tensors = {path: value for path, value in flat.items() if isinstance(value, torch.Tensor)}
    assert all(type(value) is torch.Tensor for value in tensors.values())
    write_tensors(tensors, folder / "optimizer.safetensors")
    (folder / "numbers.json").write_text(json.dumps({path: flat[path] for path in flat.keys() - tensors.keys()}))
    return tensors


def restore(folder, model, optimizer) -> None:
    numbers = json.loads((folder / "numbers.json").read_text())
    optimizer_state.restore(model, optimizer, TensorReader(folder, "optimizer"), numbers)


@pytest.mark.parametrize("optim", KINDS)
def test_memory_is_what_the_plan_says(optim):
    """The qmap of 16 or 256 numbers does not count."""
    cfg = RunConfig(optim=optim)
    model = torch.nn.Linear(128, 256, bias=False)
    optimizer = make_optimizer(cfg, model)
    gradients(model, 0)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    flat = optimizer_state.flatten(model, optimizer)
    moments = [value for path, value in flat.items() if ".codes/" in path or ".scale/" in path]
    assert moment_bytes(cfg, model.weight.numel(), model.weight.nbytes) == sum(value.nbytes for value in moments)


def test_many_small_tensors_are_warned_of(capsys):
    optimizer = make_optimizer(RunConfig(optim="adamw_8bit"), torch.nn.Linear(4, 4))
    optimizer.step()
    assert "2 of 2 tensors, 100% of the trained weights, keep moments in the dtype" in capsys.readouterr().err


# ---- runs ----------------------------------------------------------------------------------------------------------------


def optimizer_file(run: kit.Run, step: int = 7) -> dict[str, torch.Tensor]:
    return kit.load_weights(run.folder / "checkpoints" / f"step_{step:08d}", "optimizer")


def check_kills(folder, values: dict, world: int, micro: int, env: dict | None = None) -> kit.Run:
    """Assert that a run that is killed three times ends bitwise like an undisturbed one, which is returned."""
    train = partial(technique_runs.train, fields=values, world=world, micro=micro, env=env, units=1)
    straight = train(folder / "straight")
    flags = kit.flags(**(values | {"per_device_batch_size": micro}))
    for step in (3, 4, 6):  # checkpoints are those of steps 2, 4, 6
        train_until_killed(step, world, folder / "killed", *flags, env=env)
    killed = train(folder / "killed")
    assert kit.same(killed.weights, straight.weights)
    assert kit.same(optimizer_file(killed), optimizer_file(straight))
    assert kit.timeless(killed.folder) == kit.timeless(straight.folder)
    return straight


@pytest.mark.parametrize("optim", KINDS)
def test_three_kills_on_one_process(tmp_path, optim):
    run = check_kills(tmp_path, fields(tmp_path, optim), world=1, micro=16)
    saved = optimizer_file(run)
    assert saved[f"exp_avg.codes/{MATRIX}"].dtype == torch.uint8
    assert saved[f"exp_avg.codes/{MATRIX}"].numel() == 64 * 256 // (2 if optim == "adamw_4bit" else 1)


def test_three_kills_under_ddp(tmp_path):
    check_kills(tmp_path, fields(tmp_path), world=2, micro=4)


def test_mutant_moments_saved_as_floats_are_seen(tmp_path, monkeypatch):
    """What a quantized tensor shows of itself is float32: without `state_to_save`, a resumed run keeps such moments."""
    from addons.optimizers.torchao import LowBit

    values = fields(tmp_path)
    monkeypatch.delattr(LowBit, "state_to_save")
    run = technique_runs.train(tmp_path / "run", values)
    again = technique_runs.train(kit.rewind(run.folder, 2, tmp_path / "again"), values)
    assert not kit.same(again.weights, run.weights)


def test_skipped_update_leaves_state_and_weights(tmp_path, monkeypatch):
    """A gradient that is not finite at step 4, on one of two ranks."""
    import train

    original = train.compute_gradient

    def spoiled(backend, module, batch, totals):
        losses = original(backend, module, batch, totals)
        if batch[0][0].step == 3:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))
        return losses

    monkeypatch.setattr(train, "compute_gradient", spoiled)
    run = technique_runs.train(tmp_path / "run", fields(tmp_path, save_steps=1), world=2, micro=4)
    assert run.kind("train")[-1]["skipped"] == 1
    assert kit.same(optimizer_file(run, 3), optimizer_file(run, 4))
    assert not kit.same(optimizer_file(run, 4), optimizer_file(run, 5))
    weights = [kit.load_weights(run.folder / "checkpoints" / f"step_{step:08d}") for step in (3, 4)]
    assert kit.same(*weights)


# ---- sharded models ------------------------------------------------------------------------------------------------------


def shaped_model(optim: str) -> torch.nn.Module:
    """Return rows of whole blocks, also in uneven shards; blocks of several rows; a matrix of which two shards cut a block."""
    torch.manual_seed(0)
    shapes = {"rows": (64, 256), "uneven": (65, 256), "flat": (128, 128), "vector": (8192,), "small": (9,)}
    shapes["cut"] = (66, 64 if optim == "adamw_4bit" else 128)
    model = torch.nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
    return model


def moments_of_shards(optim: str, folder) -> dict[str, torch.Tensor]:
    """Load the state of a whole model into a sharded one; return what that saves, gathered."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = shaped_model(optim)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    optimizer = make_optimizer(RunConfig(optim=optim), model)
    restore(folder, model, optimizer)
    kinds = {name: type(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()}
    assert kinds["cut"] is kinds["small"] is torch.Tensor
    assert len(set(kinds.values())) == 2
    saved = optimizer_state.flatten(model, optimizer)
    return {path: gather_full(value).clone() for path, value in saved.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("optim", KINDS)
def test_state_of_shards_is_that_of_the_whole(tmp_path, optim):
    """In both directions; where shards cut a block, they hold the values of the whole moment."""
    model = shaped_model(optim)
    optimizer = make_optimizer(RunConfig(optim=optim), model)
    gradients(model, 0)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    whole = save(tmp_path, model, optimizer)
    for saved in kit.spawn(2, moments_of_shards, optim, tmp_path, out=tmp_path / "out"):
        same = [path for path in whole if not path.endswith("/cut")]
        assert all(torch.equal(saved[path], whole[path]) for path in same)
        for key in ("exp_avg", "exp_avg_sq"):
            values = optimizer.state[model.cut][key].dequantize()
            assert torch.equal(saved[f"{key}/cut"], values)


def two_shards() -> dict[str, str]:
    return kit.where("fsdp2", 2, mixed_precision="no")


@pytest.mark.parametrize("optim", KINDS)
def test_three_kills_under_fsdp2(tmp_path, optim):
    """In float64 the gradient is that of one process but for 1e-15, and so are the codes. The update has float32."""
    values = fields(tmp_path, optim, dtype="float64")
    sharded = check_kills(tmp_path, values, world=2, micro=4, env=two_shards())
    if optim != "adamw_8bit":
        return
    one = technique_runs.train(tmp_path / "one", values, 1, 4)
    moved = technique_runs.train(kit.rewind(sharded.folder, 4, tmp_path / "moved"), values, 1, 4)
    for run in (sharded, moved):
        assert kit.distance(run.weights, one.weights) <= 1e-6


# ---- stochastic rounding -------------------------------------------------------------------------------------------------

ROUNDED = {"dtype": "bfloat16", "optim_args": json.dumps({"bf16_stochastic_round": True}), "save_steps": 2}


def test_stochastic_rounding_is_the_same_on_replicas_and_after_kills(tmp_path):
    """Each save compares the replicas."""
    values = fields(tmp_path, **ROUNDED)
    check_kills(tmp_path, values, world=2, micro=4)


def test_lost_updates_are_warned_of_only_without_it(capsys):
    for given, is_warned in (({}, True), ({"bf16_stochastic_round": True}, False)):
        weight_dtype(RunConfig(dtype="bfloat16", optim_args=given))
        assert ("lose updates" in capsys.readouterr().err) == is_warned


def test_rounding_depends_on_seed_and_update_and_keeps_small_updates():
    """An update of a thousandth of the spacing of bfloat16 is lost by rounding to the nearest, and kept on average here."""

    def trained(steps: int = 1, **given) -> torch.Tensor:
        torch.manual_seed(steps)  # not what decides
        model = torch.nn.Linear(64, 128, bias=False, dtype=torch.bfloat16)
        torch.nn.init.ones_(model.weight)
        cfg = RunConfig(optim="adamw_8bit", dtype="bfloat16", learning_rate=1e-5, weight_decay=0.0, **given)
        optimizer = make_optimizer(cfg, model)
        with torch.compiler.set_stance("force_eager"):
            for _ in range(steps):
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
        return model.weight.detach().double()

    rounded = {"optim_args": {"bf16_stochastic_round": True}}
    first = trained(**rounded)
    assert torch.equal(first, trained(**rounded))
    assert not torch.equal(first, trained(**rounded, seed=43))
    moved = 1 - trained(20, **rounded).mean().item()
    assert moved == pytest.approx(20 * 1e-5, rel=0.3)
    assert trained(20).eq(1).all()  # the mutant


def test_mutant_rounding_without_a_seed_is_found_by_the_replica_check(tmp_path, monkeypatch):
    monkeypatch.setattr("addons.optimizers.torchao.seed_everything", lambda seed: None)
    with pytest.raises(kit.RankFailed, match="the model replicas differ at step 2"):
        technique_runs.train(tmp_path / "run", fields(tmp_path, **ROUNDED), world=2, micro=4)


def test_stochastic_rounding_under_fsdp2(tmp_path):
    check_kills(tmp_path, fields(tmp_path, **ROUNDED), world=2, micro=4, env=two_shards())
