"""The model card: what the Hub reads, the last evaluation, and lines that load the model."""

import re

import pytest
import yaml

from tests.helpers import kit


def loading_lines(folder) -> str:
    return re.search("```python\n(.*)```", (folder / "README.md").read_text(), re.DOTALL)[1]


@pytest.mark.parametrize("chats", [True, False])
def test_card_of_a_language_model(tmp_path, monkeypatch, capsys, chats):
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    row = {"messages": turns} if chats else {"text": "one two"}
    rows = kit.write_jsonl(tmp_path / "rows.jsonl", [row] * 4)
    fields = {
        "tokenizer_name": kit.tiny_tokenizer(tmp_path / "tokenizer", ["one two"] * 9),
        "cache_dir": tmp_path / "cache",
    }
    fields |= {"model_config": kit.write_yaml(tmp_path / "model.yaml", kit.LLAMA), "train_file": rows}
    fields |= {"validation_file": rows, "global_batch_size": 4, "per_device_batch_size": 4, "max_steps": 1}
    run = kit.run_training(1, tmp_path / "run", *kit.flags(**fields, **({"chat_template": "chatml"} if chats else {})))
    final = run.folder / "final"
    card = (final / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["causal_lm"]}
    [line] = run.kind("eval")
    assert f"| loss | {line['loss']} |" in card
    assert "transformers 5." in card
    monkeypatch.chdir(final)
    exec(loading_lines(final), {})
    assert "generated_text" in capsys.readouterr().out
