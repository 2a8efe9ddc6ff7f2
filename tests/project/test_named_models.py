"""Run files of named models: their plan, on the model configurations that are here, has the published parameters."""

import json
import re

import pytest

import train
from tests.helpers import kit

MODELS = {  # run file: (its model in configs/models/, parameters of the published weights, whether all are trained)
    "qwen3_0.6b_full": ("qwen3_0.6b", 596_049_920, True),
    "qwen3_8b_lora": ("qwen3_8b", 8_190_735_360, False),
    "llama3.1_8b_qlora": ("llama3.1_8b", 8_030_261_248, False),
    "smollm3_full": ("smollm3_3b", 3_075_098_624, True),
    "qwen3_30b_a3b_lora": ("qwen3_30b_a3b", 30_532_122_624, False),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tokenizer with a chat template, and rows of chats, instead of the dataset of the Hub."""
    folder = tmp_path_factory.mktemp("named")
    text = "the cat sat on a mat"
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    rows = [{"messages": turns}] * 20
    return {
        "tokenizer_name": kit.tiny_tokenizer(folder / "tokenizer", [text] * 3, chat_template=kit.CHATML),
        "train_file": kit.write_jsonl(folder / "train.jsonl", rows),
        "validation_file": kit.write_jsonl(folder / "validation.jsonl", rows),
        "cache_dir": folder / "cache",
        "dataset_name": "null",
        "model_name_or_path": "null",
    }


def runs():
    """The names of the run files; those with an adapter need extra packages."""
    return [name if full else pytest.param(name, marks=pytest.mark.cluster) for name, (*_, full) in MODELS.items()]


@pytest.mark.parametrize("name", runs())
def test_plan_has_the_published_parameters(files, tmp_path, monkeypatch, capsys, name):
    """Without the network, and without memory for the weights."""
    model, parameters, is_full = MODELS[name]
    if not is_full:
        pytest.importorskip("peft", reason="peft is not installed: pip install -r requirements-extra.txt")
        kit.need_addon("adapters/peft")
    if "qlora" in name:
        pytest.importorskip(
            "bitsandbytes", reason="bitsandbytes is not installed: pip install -r requirements-extra.txt"
        )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fields = files | {"config": f"configs/{name}.yaml", "model_config": f"configs/models/{model}.yaml"}
    train.main([*kit.flags(**fields, output_dir=tmp_path / "run"), "--dry_run", "true"])
    plan = capsys.readouterr().out
    total, trainable = re.search(r"parameters +([\d,]+) \(([\d,]+) trainable\)", plan).groups()
    total, trainable = int(total.replace(",", "")), int(trainable.replace(",", ""))
    assert total - (0 if is_full else trainable) == parameters
    assert (trainable == total) == is_full
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", MODELS)
def test_run_file_names_its_command_and_its_plan(name):
    """The second command is the one that test_plan_has_the_published_parameters shortens."""
    lines = (kit.REPOSITORY / "configs" / f"{name}.yaml").read_text().splitlines()
    assert re.fullmatch(rf"# accelerate launch --config_file \S+ train.py --config configs/{name}.yaml", lines[0])
    comment = " ".join(line.strip("# ") for line in lines if line.startswith("#"))
    assert f"train.py --config configs/{name}.yaml --dry_run --model_name_or_path null" in comment
    assert f"--model_config configs/models/{MODELS[name][0]}.yaml --dataset_name stdlib_chats" in comment


def test_sample_of_chats_has_questions_and_answers(tmp_path, monkeypatch):
    from samples import _stdlib, stdlib_chats

    few = [(path, text) for path, text in _stdlib.module_sources() if path.startswith(("json/", "html/"))]
    monkeypatch.setattr(_stdlib, "module_sources", lambda: few)
    stdlib_chats.make(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for row in rows:
        question, answer = row["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert question["content"].endswith(answer["content"].split("\n")[0])
    assert rows
