"""New tokens under LoRA: their rows are trained, in embedding and head, saved, merged, and come back bitwise."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from addons.adapters.peft import injection
from engine.checkpointing.locate_weights import init_weights
from engine.config.errors import UsageError
from tests.helpers import kit

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.cluster  # needs an extra package

TOKENS = ["<|call|>", "<|end|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    kit.write_jsonl(folder / "train.jsonl", [{"text": f"def <|call|> return{i} <|end|> self"} for i in range(12)])
    tokenizer = AutoTokenizer.from_pretrained(kit.tiny_tokenizer(folder / "tokenizer", ["def return self"] * 3))
    for name in ("tied", "untied"):
        config = kit.LLAMA | {"vocab_size": len(tokenizer), "tie_word_embeddings": name == "tied"}
        kit.save_model(folder / name, config)
        tokenizer.save_pretrained(folder / name)
    return folder


def fields(folder, name, **more) -> dict:
    given = {"model_name_or_path": folder / name, "train_file": folder / "train.jsonl", "cache_dir": folder / "cache"}
    given |= {"validation_file": folder / "train.jsonl", "dtype": "float64", "add_tokens": TOKENS, "max_length": 64}
    return given | {"peft": '{"type": "lora", "r": 2, "target": ["q_proj"]}'} | more


def moved(folder, name) -> tuple[list[bool], list[bool]]:
    """Return whether two steps change the rows of the new tokens, and any other row, of embedding and head."""
    task, splits = kit.open_data(**fields(folder, name))
    model = task.build_model().train()
    batch = task.collate(kit.all_rows(splits["train"]), True)
    ids = task.tokenizer.convert_tokens_to_ids(TOKENS)
    width = model.config.hidden_size
    others = [i for i in range(len(task.tokenizer)) if i not in ids]

    def rows() -> list[torch.Tensor]:
        with torch.no_grad():
            embedded = model.get_input_embeddings()(torch.arange(len(task.tokenizer)))
            return [embedded, model.get_output_embeddings()(torch.eye(width, dtype=torch.float64)).T]

    before = rows()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 1e-2)
    for _ in range(2):
        task.loss(model, batch.inputs)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    changes = [(after - start).abs().max(1).values for after, start in zip(rows(), before, strict=True)]
    return [bool((change[ids] > 0).all()) for change in changes], [
        bool((change[others] > 0).any()) for change in changes
    ]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_rows_of_new_tokens_are_trained_and_no_others(folder, name):
    assert moved(folder, name) == ([True, True], [False, False])


def test_mutant_leaves_new_rows_untrained(folder, monkeypatch):
    monkeypatch.setattr(injection, "_train_new_tokens", lambda *_: None)
    assert moved(folder, "untied")[0] == [False, False]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_new_tokens_are_merged_into_final_and_resumed_bitwise(folder, tmp_path, name):
    common = fields(folder, name, global_batch_size=4, per_device_batch_size=2, max_steps=4, save_steps=2)
    common |= {"save_total_limit": 5, "learning_rate": 1e-2}
    world = 2 if name == "untied" else 1
    run = kit.run_training(world, tmp_path / "run", *kit.flags(**common))
    final = load_file(run.folder / "final" / "model.safetensors")
    assert ("lm_head.weight" in final) == (name == "untied")
    model = AutoModelForCausalLM.from_pretrained(run.folder / "final", dtype="float64")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "final")
    ids = tokenizer.convert_tokens_to_ids(TOKENS)
    start = AutoModelForCausalLM.from_pretrained(folder / name, dtype="float64")
    for mine, old in ((model.get_input_embeddings(), start.get_input_embeddings()), (model.lm_head, start.lm_head)):
        assert torch.equal(mine.weight[: ids[0]], old.weight)
        assert ((mine.weight[ids] - old.weight.mean(0)).abs().max(1).values > 1e-3).all()
    whole, _ = kit.open_data(
        **{key: value for key, value in common.items() if key != "peft"}
    )  # all of it is trained further
    assert torch.equal(whole.build_model(str(run.folder / "final")).lm_head.weight, model.lm_head.weight)
    _, [text] = kit.run_command("eval", "--checkpoint", run.folder, folder=tmp_path)
    assert json.loads((run.folder / "eval.json").read_text())["step"] == 4, text
    shutil.copytree(run.folder, tmp_path / "resumed")
    for part in ("final", "checkpoints/step_00000004"):
        shutil.rmtree(tmp_path / "resumed" / part)
    again = kit.run_training(world, tmp_path / "resumed", *kit.flags(**common))
    resumed = load_file(again.folder / "final" / "model.safetensors")
    assert all(torch.equal(final[each], resumed[each]) for each in final)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_peft_loads_an_adapter_with_new_tokens(folder, tmp_path, name):
    """From final/adapter/, and from final/ with merge: false: it resizes the base model to the tokenizer beside them."""
    common = fields(folder, name, global_batch_size=4, per_device_batch_size=4, max_steps=2, learning_rate=1e-2)
    merged = kit.run_training(1, tmp_path / "merged", *kit.flags(**common)).folder / "final"
    argv = kit.flags(**common, merge=False, output_dir=tmp_path / "alone")
    codes, outputs = kit.run_command("train.py", *argv, folder=tmp_path / "here")
    assert codes == [0], outputs
    tokenizer = AutoTokenizer.from_pretrained(merged)
    ids = tokenizer("def <|call|> self <|end|>", return_tensors="pt").input_ids
    expected = AutoModelForCausalLM.from_pretrained(merged, dtype="float64")(input_ids=ids).logits
    for place in (merged / "adapter", tmp_path / "alone/final"):
        found = peft.AutoPeftModelForCausalLM.from_pretrained(place, dtype="float64")(input_ids=ids).logits
        assert torch.allclose(found, expected, rtol=0, atol=1e-10)


def test_base_folder_without_tokenizer(folder, tmp_path):
    """A checkpoint remembers which rows its base lacks: eval.py reads another tokenizer, or none, beside the base."""
    shutil.copytree(folder / "untied", tmp_path / "base", ignore=shutil.ignore_patterns("tokenizer*"))
    common = fields(folder, "untied", model_name_or_path=tmp_path / "base", tokenizer_name=folder / "tokenizer")
    common |= {"global_batch_size": 4, "per_device_batch_size": 2, "max_steps": 2, "save_steps": 2, "eval_steps": 2}
    run = kit.run_training(1, tmp_path / "run", *kit.flags(**common | {"learning_rate": 1e-2}))
    loss = run.kind("eval")[-1]["loss"]
    for name in (run.folder / "final", run.folder / "checkpoints" / "step_00000002"):
        flags = kit.flags(cache_dir=folder / "cache", validation_file=folder / "train.jsonl")
        kit.run_command("eval", "--checkpoint", name, *flags, folder=tmp_path)
        assert json.loads((run.folder / "eval.json").read_text())["loss"] == loss


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A run of one step with TOKENS."""
    common = {"global_batch_size": 4, "per_device_batch_size": 4, "max_steps": 1, "save_steps": 1}
    common |= {"save_total_limit": 5}
    return kit.run_training(1, tmp_path_factory.mktemp("run"), *kit.flags(**fields(folder, "untied", **common)))


@pytest.mark.parametrize("tokens", [TOKENS[::-1], [*TOKENS, "<|third|>"], TOKENS[:1], []])
@pytest.mark.parametrize("part", ["final", "checkpoints/step_00000001"])
def test_init_from_with_other_tokens_is_refused(folder, trained, part, tokens):
    task, _ = kit.open_data(**fields(folder, "untied", add_tokens=tokens or "[]", init_from=trained.folder / part))
    names = " ".join(tokens) or "none"
    text = re.escape(f"was trained with {' '.join(TOKENS)}, but this run names {names}: give the same tokens")
    with pytest.raises(UsageError, match=f"^add_tokens: the adapter in .* {text}"):
        task.build_model(str(init_weights(task.cfg, task)))


def test_init_from_with_the_same_tokens_and_further_ones_on_the_merged_model(folder, trained):
    final = trained.folder / "final"
    task, _ = kit.open_data(**fields(folder, "untied", init_from=final))
    assert init_weights(task.cfg, task) == final
    merged = AutoModelForCausalLM.from_pretrained(final, dtype="float64")
    more = [*TOKENS, "<|third|>"]
    task, _ = kit.open_data(**fields(folder, "untied", add_tokens=more, model_name_or_path=final))
    assert init_weights(task.cfg, task) is None
    model = task.build_model()
    with torch.no_grad():
        rows = model.get_input_embeddings()(torch.arange(len(task.tokenizer)))
    assert torch.equal(rows[:-1], merged.get_input_embeddings().weight)
    assert torch.allclose(rows[-1], rows[:-1].mean(0), atol=1e-15)


def test_adapter_of_peft_with_rows_of_other_tokens_is_refused(folder, trained, tmp_path):
    """peft saves the ids, and no tokens."""
    shutil.copytree(trained.folder / "final" / "adapter", tmp_path / "adapter")
    task, _ = kit.open_data(**fields(folder, "untied", init_from=tmp_path / "adapter"))
    task.build_model(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    for name, ids in config["trainable_token_indices"].items():
        config["trainable_token_indices"][name] = ids[::-1]
    file.write_text(json.dumps(config))
    with pytest.raises(
        UsageError, match=r"^add_tokens: the adapter in .* has rows of the tokens \[\d+, \d+\], but this run"
    ):
        task.build_model(str(tmp_path / "adapter"))


def test_types_that_cannot_train_rows_are_refused(folder):
    with pytest.raises(UsageError, match="type ia3 cannot train the rows of add_tokens"):
        task, _ = kit.open_data(**fields(folder, "untied", peft='{"type": "ia3"}'))
        task.build_model()
