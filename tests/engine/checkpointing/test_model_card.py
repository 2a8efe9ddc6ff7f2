"""The model card: what the Hub reads, the last evaluation, and lines that load the model."""

import re

import transformers
import yaml

from tests.helpers import kit


def test_card_of_a_language_model(tmp_path, monkeypatch):
    rows = kit.write_jsonl(tmp_path / "rows.jsonl", [{"text": "one two"}] * 4)
    fields = {
        "tokenizer_name": kit.tiny_tokenizer(tmp_path / "tokenizer", ["one two"] * 9),
        "cache_dir": tmp_path / "cache",
    }
    fields |= {"model_config": kit.write_yaml(tmp_path / "model.yaml", kit.LLAMA), "train_file": rows}
    fields |= {"validation_file": rows, "global_batch_size": 4, "per_device_batch_size": 4, "max_steps": 1}
    run = kit.run_training(1, tmp_path / "run", *kit.flags(**fields))
    final = run.folder / "final"
    card = (final / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["causal_lm"]}
    [line] = run.kind("eval")
    assert f"| loss | {line['loss']} |" in card
    assert f"transformers {transformers.__version__}" in card
    monkeypatch.chdir(final)
    names: dict = {}
    exec(re.search("```python\n(.*)```", card, re.DOTALL)[1], names)
    assert kit.same(
        kit.load_weights(final), {name: names["model"].state_dict()[name] for name in kit.load_weights(final)}
    )
    assert len(names["tokenizer"]) > 1
