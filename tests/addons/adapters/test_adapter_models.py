"""Adapters of unusual models: experts, convolutions with running statistics, new heads, 16 bits; each saved and merged."""

import json
from dataclasses import replace

import pytest
import torch

from addons.adapters.peft import merging
from engine.checkpointing import model_folder
from engine.config.errors import UsageError
from engine.run.model_with_loss import ModelWithLoss
from tests.helpers import kit, plain_task, technique_runs

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.cluster  # needs an extra package

IDS = torch.tensor([[1, 2, 3, 4, 5]])
MIXTRAL = kit.LLAMA | {"model_type": "mixtral", "vocab_size": 50, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"type": "lora", "r": 2, "target": ["q_proj"]}
EXPERTS |= {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def open_task(folder, config: dict, options: dict, dtype: str = "float64", **more):
    """Return (task, inputs of a batch) of a causal language model."""
    values = technique_runs.files(folder) | more
    fields = {name: values[name] for name in ("train_file", "model_name_or_path") if name in values}
    if "model_name_or_path" not in fields:
        fields["model_config"] = kit.write_yaml(folder / "model.yaml", config)
    task, splits = kit.open_data(**fields, dtype=dtype, output_dir=folder / "run", peft=json.dumps(options))
    return task, task.collate(splits["train"].rows(range(8)), training=True).inputs


def trained(task, inputs: dict) -> torch.nn.Module:
    """Return the model after some steps of plain gradient descent."""
    model = task.build_model().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        task.loss(model, inputs)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def write(task, model, folder) -> None:
    """Write what a checkpoint holds of the model."""
    folder.mkdir()
    state = model.state_dict(keep_vars=True)
    left_out = task.left_out(model, state)
    kept = {name: value for name, value in state.items() if name not in left_out}
    model_folder.write_model(ModelWithLoss(model, task), folder, kept)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def test_experts_are_merged_layer_by_layer(tmp_path, monkeypatch):
    """transformers divides the experts again when it saves them; final/ is of several files here."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(merging, "MERGED_AT_ONCE", 1)
    base = kit.save_model(tmp_path / "base", MIXTRAL)
    task, inputs = open_task(tmp_path, MIXTRAL, EXPERTS, model_name_or_path=base)
    model = trained(task, inputs)
    expected = logits(model)
    write(task, model, tmp_path / "out")
    assert torch.equal(logits(task.build_model(str(tmp_path / "out"))), expected)
    assert task.cfg.addons[0].finish(task, tmp_path / "out")
    assert len([*(tmp_path / "out").glob("model-*-of-00003.safetensors")]) == 3
    assert torch.equal(logits(task.build_model(str(tmp_path / "out"))), expected)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager")
    assert torch.allclose(logits(merged), expected, rtol=0, atol=1e-6)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, experts_implementation="eager")
    assert (logits(plain) - expected).abs().max() > 1e-3
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "out/adapter")
    assert torch.allclose(logits(adapted), expected, rtol=0, atol=1e-6)


def test_dora_on_experts_is_refused(tmp_path):
    task, _ = open_task(tmp_path, MIXTRAL, EXPERTS | {"use_dora": True})
    with pytest.raises(UsageError, match=r"(?i)dora"):
        task.build_model()


@pytest.mark.parametrize("merge", [True, False])
def test_adapter_of_16_bit_weights_is_float32(tmp_path, merge):
    """The merged model has the dtype of the base model, and differs from the adapted one by its rounding."""
    from transformers import AutoModelForCausalLM

    base = kit.save_model(tmp_path / "base", kit.LLAMA | {"vocab_size": 50})
    options = {"type": "lora", "r": 4, "target": "all-linear"}
    task, inputs = open_task(tmp_path, {}, options, "bfloat16", model_name_or_path=base)
    model = trained(task, inputs)
    dtypes = {value.requires_grad: value.dtype for value in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    expected = logits(model)
    write(task, model, tmp_path / "out")
    assert torch.equal(logits(task.build_model(str(tmp_path / "out"))), expected)
    replace(task.cfg.addons[0], merge=merge).finish(task, tmp_path / "out")
    assert torch.equal(logits(task.build_model(str(tmp_path / "out"))), expected)
    if merge:
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert {value.dtype for value in merged.parameters()} == {torch.bfloat16}
        assert torch.allclose(logits(merged), expected, rtol=0, atol=0.05)
    else:
        assert {value.dtype for value in kit.load_weights(tmp_path / "out", "adapter_model").values()} == {
            torch.float32
        }


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_float32_adapter_of_16_bit_weights_on_two_processes(tmp_path, backend):
    """FSDP2 has both dtypes in one group; it resumes bitwise."""
    off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    base = kit.save_model(tmp_path / "base", kit.TINY | off)
    values = technique_runs.files(tmp_path) | {"dtype": "bfloat16", "model_name_or_path": base}
    values["peft"] = json.dumps({"type": "lora", "r": 4, "target": ["c_attn"]})
    values = {name: value for name, value in values.items() if name != "model_config"}
    env = kit.where("fsdp2", 2, mixed_precision="no") if backend == "fsdp2" else None
    run = technique_runs.check_resume(tmp_path, values, 2, 4, env, units=1)
    moments = kit.load_weights(run.folder / "checkpoints/step_00000004", "optimizer")
    assert {value.dtype for name, value in moments.items() if "exp_avg" in name} == {torch.float32}
    assert {value.dtype for value in run.weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("merge", [True, False])
def test_running_statistics_are_saved(tmp_path, merge):
    """Training changes those of the frozen base model: a checkpoint and final/ hold them."""
    with plain_task.registered():
        data = plain_task.write_data(tmp_path)
        options = {"type": "lora", "r": 2, "target": ["linear"]}
        argv = plain_task.flags(data, peft=json.dumps(options), merge=merge, norm=True, max_steps=10)
        codes, outputs = kit.run_command("train.py", *argv, "--output_dir", "run", folder=tmp_path / "here", world=2)
        assert codes == [0, 0], outputs
        run = tmp_path / "here/run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found = kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", run / "final")
        assert found == [line for line in lines if line["kind"] == "eval"][-1]
        names = kit.load_weights(run / ("final/adapter" if merge else "final"), "adapter_model").keys()
        assert any("running_mean" in name for name in names)


def test_new_head_alone_with_its_adapter(tmp_path):
    """A classifier on a pretrained model that has none: final/ without merge holds the trained head, too."""
    kit.need_task("text_classification")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    from transformers import AutoConfig, AutoModel

    tokenizer = kit.tiny_tokenizer(tmp_path / "base", ["a b c"])
    config = AutoConfig.for_model("bert", vocab_size=320, **small)
    AutoModel.from_config(config).save_pretrained(tmp_path / "base")
    rows = [{"text": "a b", "label": "no"}, {"text": "c", "label": "yes"}] * 8
    argv = kit.flags(
        task="text_classification",
        model_name_or_path=tokenizer,
        train_file=kit.write_jsonl(tmp_path / "train.jsonl", rows),
        validation_file=kit.write_jsonl(tmp_path / "validation.jsonl", rows[:5]),
        dtype="float64",
        global_batch_size=8,
        max_steps=4,
        learning_rate=1e-2,
        save_steps=2,
        peft=json.dumps({"type": "lora", "r": 2, "target": ["query"]}),
        merge=False,
    )
    codes, outputs = kit.run_command("train.py", *argv, "--output_dir", "run", folder=tmp_path / "here")
    assert codes == [0], outputs
    run = tmp_path / "here/run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", run / "final")
    assert found == [line for line in lines if line["kind"] == "eval"][-1]
    assert json.loads((run / "final/adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
