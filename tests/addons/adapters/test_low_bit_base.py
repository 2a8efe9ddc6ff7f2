"""A base in 4 or 8 bits: the layers and bits of transformers, exact for every split, resumed and evaluated bitwise."""

import copy
import importlib
import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from addons.adapters import low_bit_base as addon
from engine.config.errors import UsageError
from engine.config.find_addons import run_config
from engine.process import private_apis
from engine.run.memory import bytes_of_scales, count_bytes, count_parameters
from tests.helpers import alive, kit, technique_runs

peft = pytest.importorskip("peft")
bitsandbytes = private_apis.bitsandbytes()
pytestmark = [
    pytest.mark.cluster,  # needs extra packages
    pytest.mark.skipif(bitsandbytes is None, reason="bitsandbytes is not installed"),
]

STEPS = 20
LORA = {"type": "lora", "r": 4, "target": ["q_proj", "v_proj", "down_proj"], "lora_alpha": 16}
LLAMA = {"model_type": "llama", "vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None}
SIZES = (64, 48)  # hidden sizes: rows of whole blocks of NF4, and blocks that cross rows


def save_model(folder, hidden: int = 64, dtype=torch.float32, **values) -> str:
    """Save a model with random weights; return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "pad_token_id": 0} | LLAMA | values
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with torch.no_grad():  # of another size than the initial 0.02, so that rounding is seen in the loss
        for value in model.parameters():
            value.mul_(5.0) if value.dim() > 1 else None
    model.to(dtype).save_pretrained(folder)
    return str(folder)


def fields(folder, hidden: int = 64, **more) -> dict:
    """Return the fields of a run on a saved model: float64 outside of the layers with few bits."""
    values = technique_runs.files(folder) | {"load_in_4bit": True, "peft": json.dumps(LORA)}
    del values["model_config"]
    name = save_model(folder / f"base{hidden}", hidden)
    return values | {"model_name_or_path": name, "merge": True} | more


def adapter(run: kit.Run, step: int = technique_runs.STEPS) -> dict[str, torch.Tensor]:
    return kit.load_weights(run.folder / "checkpoints" / f"step_{step:08d}", "adapter")


# ---- the base ------------------------------------------------------------------------------------------------------------


def by_transformers(folder, bits: int, compute=torch.float32):
    """Return the model as transformers quantizes it while loading."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": compute}
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **nf4)
    where = {"dtype": torch.float32, "device_map": {"": "cpu"}}
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **where)


def opened(tmp_path, name: str, bits: int, **more):
    """Return (task, the quantized model) of a run on the model `name`, without its adapter."""
    rows = kit.write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}])
    values = {"model_name_or_path": name, "train_file": rows, "peft": json.dumps(LORA), "output_dir": tmp_path / "run"}
    task, _ = kit.open_data(**values, **{f"load_in_{bits}bit": True}, **more)
    model = task.build()
    addon.quantize(task, model, bits)
    return task, model


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("values", [{"hidden": 64}, {"hidden": 48}, {"tie_word_embeddings": True}, kit.TINY])
def test_same_layers_and_bits_as_transformers(tmp_path, monkeypatch, bits, values):
    """Rows of whole blocks or not, a tied head, GPT-2, whose layers are transposed; from weights in any dtype."""
    name = save_model(tmp_path / "base", **values)
    expected = by_transformers(name, bits)
    _, model = opened(tmp_path, name, bits)
    assert kit.same(model.state_dict(), expected.state_dict())
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    if values == {"hidden": 64}:
        monkeypatch.setattr(private_apis, "names_not_to_quantize", lambda model: [])
        _, mutant = opened(tmp_path, name, bits)  # with a quantized head
        assert mutant.state_dict().keys() != expected.state_dict().keys()


@pytest.mark.parametrize("bits", [4, 8])
def test_bits_do_not_depend_on_the_dtype_in_which_the_same_weights_are_read(tmp_path, bits):
    """bitsandbytes quantizes no float64."""
    states = []
    for written in ("bfloat16", "float64"):
        rounded = save_model(tmp_path / "rounded", dtype=torch.bfloat16)
        name = save_model(tmp_path / written, dtype=torch.bfloat16)
        if written == "float64":
            tensors = {each: value.double() for each, value in load_file(f"{rounded}/model.safetensors").items()}
            save_file(tensors, f"{name}/model.safetensors", {"format": "pt"})
        for dtype in ("bfloat16", "float32", "float64"):
            _, model = opened(tmp_path, name, bits, dtype=dtype)
            assert model.model.norm.weight.dtype == getattr(torch, dtype)
            layers = {each: module for each, module in model.named_modules() if hasattr(module, "quant_state")}
            layers |= {each: module for each, module in model.named_modules() if hasattr(module, "state")}
            states.append(
                {f"{each}.{key}": value for each, m in layers.items() for key, value in m.state_dict().items()}
            )
    assert len(states[0]) > 20
    assert all(kit.same(states[0], state) for state in states[1:])


@pytest.mark.parametrize("bits", [4, 8])
def test_plan_counts_the_bytes_that_a_model_has(tmp_path, bits):
    """Without quantizing: a plan of a large model needs no memory."""
    task, model = opened(tmp_path, save_model(tmp_path / "base", 48), bits)
    empty = task.build(empty=True)
    addon.quantize(task, empty, bits, empty=True)
    layers = [module for module in model.modules() if hasattr(module, "quant_state") or hasattr(module, "state")]
    assert count_bytes(empty)[0] == count_bytes(model)[0] == sum(value.nbytes for value in model.parameters())
    assert bytes_of_scales(empty) == bytes_of_scales(model) == sum(scales_of(layer) for layer in layers)
    plain = task.build()
    assert count_parameters(empty)[0] == count_parameters(model)[0] == count_parameters(plain)[0]
    assert task.quantized_weights == sum(layer.in_features * layer.out_features for layer in layers)
    share = sum(value.nbytes for value in empty.parameters()) - sum(value.nbytes for value in plain.parameters())
    assert share == task.quantized_weights * (bits / 8 - 4)


def scales_of(layer) -> int:
    if hasattr(layer, "state"):
        return layer.weight.SCB.nbytes
    state = layer.weight.quant_state
    return sum(x.nbytes for x in (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code))


def test_evaluation_on_any_cpu_leaves_the_weights_as_they_are(tmp_path, monkeypatch):
    """bitsandbytes would repack them on a CPU with AVX512-BF16: the mutant, which trains no layer below from then on."""
    modules = sys.modules[bitsandbytes.nn.Linear4bit.__module__]
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    for is_mutant in (False, True):
        _, model = opened(tmp_path, save_model(tmp_path / "base"), bits=4)
        layers = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
        before = [layer.weight.data.clone() for layer in layers]
        for layer in layers:
            layer.support_avx512bf16_for_cpu |= is_mutant
        with torch.no_grad():
            model.eval()(input_ids=ids)
        same = [torch.equal(layer.weight.data, values) for layer, values in zip(layers, before, strict=True)]
        assert all(same) != is_mutant


@pytest.mark.parametrize("has_run", [False, True])
def test_layers_of_8_bits_move_with_their_model(tmp_path, has_run):
    """As by model.to(device), to new memory. The mutant is the layer of bitsandbytes, whose state stays where it was."""
    _, model = opened(tmp_path, save_model(tmp_path / "base"), bits=8)
    for is_mutant in (False, True):
        layer = copy.deepcopy(model.model.layers[0].mlp.down_proj).eval()
        if is_mutant:
            layer.__class__ = bitsandbytes.nn.Linear8bitLt
        rows = torch.ones(2, layer.in_features)
        if has_run:
            layer(rows)
        owner = layer.state if has_run else layer.weight
        scales = owner.SCB.clone()
        torch.nn.Sequential(layer)._apply(
            lambda values: values.double() if values.is_floating_point() else values.clone()
        )
        assert (owner.CB.data_ptr() == layer.weight.data_ptr()) != is_mutant
        assert torch.equal(owner.SCB, scales)  # no cast of a model casts them
        assert layer(rows).isfinite().all()


def test_no_kernel_is_fetched_by_importing_bitsandbytes(tmp_path, monkeypatch):
    """With packages of these names: `kernels` is there again afterwards, and a plain import, the mutant, finds it."""
    (tmp_path / "kernels.py").write_text("")
    (tmp_path / "bitsandbytes.py").write_text(
        "try:\n    import kernels\n    fetched = True\nexcept ImportError:\n    fetched = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for is_mutant in (False, True):
        for name in ("bitsandbytes", "kernels"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module("bitsandbytes") if is_mutant else private_apis.bitsandbytes()
        assert module.fetched == is_mutant
        importlib.import_module("kernels")
    for name in ("bitsandbytes", "kernels"):
        monkeypatch.delitem(sys.modules, name)


# ---- runs ----------------------------------------------------------------------------------------------------------------


def train_plain(values: dict, bits: int, dtype: str = "float64") -> dict[str, torch.Tensor]:
    """Return the adapter that transformers, peft and bitsandbytes train in a plain loop. `dtype`: of the adapter."""
    names = ("model_name_or_path", "train_file")
    task, splits = kit.open_data(**{name: values[name] for name in names}, output_dir="unused")
    batch = task.collate(splits["train"].rows(range(technique_runs.ROWS)), training=True)
    options = {"target_modules" if name == "target" else name: value for name, value in LORA.items() if name != "type"}
    base = by_transformers(values["model_name_or_path"], bits)
    for parameter in base.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.double()
    torch.manual_seed(42)
    model = peft.get_peft_model(base, peft.LoraConfig(**options)).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(trained, lr=values["learning_rate"], weight_decay=values["weight_decay"])
    for _ in range(values["max_steps"]):
        optimizer.zero_grad()
        logits = model(input_ids=batch.inputs["input_ids"]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.inputs["targets"].flatten()).backward()
        optimizer.step()
    return {name: value.double() for name, value in peft.get_peft_model_state_dict(model).items()}


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_of_transformers_peft_and_a_plain_loop(tmp_path, bits):
    """The mutants: an adapter in 16 bits, and a base in full precision."""
    values = fields(tmp_path, 48, max_steps=20, save_steps=20)
    values |= {"load_in_4bit": bits == 4, "load_in_8bit": bits == 8, "learning_rate": 1e-3}
    run = technique_runs.train(tmp_path / "run", values)
    found = kit.load_weights(run.folder / "final" / "adapter", "adapter_model")
    assert kit.distance(found, train_plain(values, bits)) <= 1e-6
    assert kit.distance(found, train_plain(values, bits, "bfloat16")) > 1e-3
    full = technique_runs.train(tmp_path / "full", values | {"load_in_4bit": False, "load_in_8bit": False})
    assert kit.distance(found, kit.load_weights(full.folder / "final" / "adapter", "adapter_model")) > 1e-3


def test_base_is_quantized_before_the_adapter(tmp_path):
    """The mutant order is an error: the adapter would be quantized, too."""
    values = fields(tmp_path)
    task, _ = kit.open_data(
        **{name: values[name] for name in ("model_name_or_path", "train_file", "peft", "load_in_4bit")}
    )
    model = task.build_model()
    names = [name for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert "model.layers.0.self_attn.q_proj.base_layer" in names
    assert not any("lora_" in name or "lm_head" in name for name in names)
    with pytest.raises(RuntimeError, match="adapter"):
        addon.quantize(task, model, 4)


@pytest.mark.parametrize("bits, hidden", [(4, 48), (8, 64)])
def test_every_split_resume_and_evaluation(tmp_path, bits, hidden):
    """In float64, with layers of few bits that compute in float32 (4 bits) and in float64 (8 bits, on a CPU)."""
    values = fields(tmp_path, hidden) | {"load_in_4bit": bits == 4, "load_in_8bit": bits == 8, "eval_steps": 2}
    one = technique_runs.train(tmp_path / "one", values)
    two = technique_runs.train(tmp_path / "two", values, 2, 2)
    assert kit.distance(adapter(one), adapter(two)) <= 1e-10
    resumed = kit.rewind(two.folder, 2, tmp_path / "resumed")
    assert kit.same(adapter(technique_runs.train(resumed, values, 2, 2)), adapter(two))
    assert kit.timeless(resumed) == kit.timeless(two.folder)
    moved = kit.rewind(two.folder, 2, tmp_path / "moved")
    assert kit.distance(adapter(technique_runs.train(moved, values, 1, 2)), adapter(two)) <= 1e-10
    checkpoint = two.folder / "checkpoints" / "step_00000004"
    assert not [*checkpoint.glob("model*.safetensors")]
    lines = {line["step"]: line for line in two.kind("eval")}
    for folder in (two.folder / "final", checkpoint):
        found = kit.run_evaluation(1, tmp_path / f"eval{folder.name}", "--checkpoint", folder)
        assert found == lines[found["step"]]
    other = [*kit.flags(**values | {"load_in_4bit": bits == 8, "load_in_8bit": bits == 4}), "--output_dir", resumed]
    codes, [output] = kit.run_command("train.py", *other, folder=tmp_path / "other")
    assert codes == [2]
    assert "load_in_4bit" in output


@pytest.mark.parametrize("bits", [4, 8])
def test_merged_model_is_the_one_that_was_trained(tmp_path, bits):
    """The dequantized base and the adapter, in bfloat16. The mutant, merged into the base as it was, is further away."""
    values = fields(tmp_path) | {"load_in_4bit": bits == 4, "load_in_8bit": bits == 8}
    run = technique_runs.train(tmp_path / "run", values)
    merged = kit.load_weights(run.folder / "final")
    assert {value.dtype for value in merged.values()} == {torch.bfloat16}
    trained = adapter(run)
    quantized = by_transformers(values["model_name_or_path"], bits).dequantize(torch.float32)
    full = load_file(f"{values['model_name_or_path']}/model.safetensors")
    for name, weight in quantized.state_dict().items():
        if f"{name.removesuffix('weight')}lora_A.default.weight" in trained:
            a, b = (trained[f"{name.removesuffix('weight')}lora_{each}.default.weight"] for each in "AB")
            delta = b @ a * LORA["lora_alpha"] / LORA["r"]
            assert torch.equal(merged[name], (weight.double() + delta).bfloat16()), name
            assert not torch.equal(merged[name], (full[name].double() + delta).bfloat16()), name
        else:
            assert torch.equal(merged[name], weight.bfloat16()), name


@pytest.mark.parametrize("bits", [None, 4])
def test_plan_says_what_a_run_has(tmp_path, bits):
    """Memory and disk of LoRA and QLoRA; final/ of the second holds the adapter alone by default."""
    values = fields(tmp_path, 256, dtype="float32") | {"load_in_4bit": bits == 4, "per_device_batch_size": 2}
    del values["merge"]
    every = LORA | {"r": 16, "target": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]}
    for name, (planned, had) in alive.measure(tmp_path, kit.flags(**values | {"peft": json.dumps(every)})).items():
        assert planned == pytest.approx(had, rel=0.1), name
    names = {path.name for path in (tmp_path / "run" / "final").iterdir()}
    assert ("model.safetensors" in names) == (bits is None)
    assert "adapter_model.safetensors" in names or bits is None


# ---- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, env, text",
    [
        ({"peft": LORA, "load_in_8bit": True}, {}, "load_in_4bit and load_in_8bit are both true"),
        ({}, {}, "load_in_4bit: .* only an adapter"),
        ({"peft": LORA}, {"ACCELERATE_USE_FSDP": "true"}, "load_in_4bit: FSDP would shard"),
        ({"peft": LORA}, {"ACCELERATE_USE_DEEPSPEED": "true"}, "load_in_4bit: DEEPSPEED would shard"),
        ({"peft": LORA}, {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "load_in_4bit: tensor parallelism would shard"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_runs_that_cannot_have_such_a_base(monkeypatch, values, env, text, training):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    cfg = run_config(load_in_4bit=True, **values)
    [sentence] = cfg.addons[0].errors(cfg, training)
    assert re.search(text, sentence)


def test_missing_package_and_other_models_are_refused(tmp_path, monkeypatch):
    cfg = run_config(load_in_8bit=True, peft=LORA)
    monkeypatch.setattr(private_apis, "bitsandbytes", lambda: None)
    [sentence] = addon.LowBitBase(False, True).errors(cfg, True)
    assert "load_in_8bit: it needs the package bitsandbytes" in sentence
    monkeypatch.undo()
    task, model = opened(tmp_path, save_model(tmp_path / "base"), bits=8)
    with pytest.raises(UsageError, match="load_in_4bit and load_in_8bit: Linear is no model of transformers"):
        addon.quantize(task, torch.nn.Linear(2, 2), 4)
    with pytest.raises(UsageError, match="load_in_4bit and load_in_8bit: LlamaForCausalLM has no linear layers"):
        addon.quantize(task, model, 4)
