"""Stochastic depth: the field of each kind of model, the same draws on any number of processes, refusals."""

import pytest

from src.config import parsing
from src.config.errors import UsageError
from src.models.load_config import load_config
from src.tasks import OPTIONS
from tests.helpers import images, kit

CONVNEXT = {"model_type": "convnext", "image_size": 16, "patch_size": 2, "hidden_sizes": [8, 16], "depths": [2, 2]}
CONVNEXT |= {"num_stages": 2}
BART = {
    "model_type": "bart",
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 64,
}


def test_layers_are_dropped_alike_on_any_number_of_processes(tmp_path):
    images.import_before_fork("convnext")
    values = {
        "task": "image_classification",
        "model_config": kit.write_yaml(tmp_path / "model.yaml", CONVNEXT),
        "train_file": images.write_pictures(tmp_path / "train.parquet", 32),
        "metrics": "none",
        "dtype": "float64",
        "global_batch_size": 16,
        "per_device_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-2,
    }
    runs = {}
    for name, world, more in (
        ("none", 1, {}),
        ("one", 1, {"stochastic_depth": 0.4}),
        ("two", 2, {"stochastic_depth": 0.4}),
    ):
        runs[name] = kit.run_training(world, tmp_path / name, *kit.flags(**values | more))
    assert kit.distance(runs["one"].weights, runs["two"].weights) <= 1e-10
    assert kit.distance(runs["one"].weights, runs["none"].weights) > 1e-4
    file = kit.write_yaml(tmp_path / "model.yaml", CONVNEXT | {"drop_path_rate": 0.4})
    own = kit.run_training(1, tmp_path / "own", *kit.flags(**values | {"model_config": file}))
    assert kit.same(own.weights, runs["one"].weights)


def test_fields_of_the_model_and_a_model_without_one(tmp_path):
    def load(config):
        flags = kit.flags(stochastic_depth=0.25, model_config=kit.write_yaml(tmp_path / "model.yaml", config))
        return load_config(parsing.parse(flags, OPTIONS)[0], None)

    bart = load(BART)
    assert (bart.encoder_layerdrop, bart.decoder_layerdrop) == (0.25, 0.25)
    with pytest.raises(UsageError, match=r"stochastic_depth is 0.25.*gpt2.*drop_path_rate"):
        load(kit.TINY)


@pytest.mark.parametrize("sharded, fix", [(False, "ddp_find_unused_parameters"), (True, "use DDP")])
def test_skipped_layers_that_other_processes_wait_for_are_refused(tmp_path, sharded, fix):
    rows = [{"source": "a b", "target": "c"}] * 8
    values = {
        "task": "seq2seq",
        "model_config": kit.write_yaml(tmp_path / "model.yaml", BART),
        "tokenizer_name": kit.tiny_tokenizer(tmp_path / "tokenizer", ["a b c"], size=300),
        "train_file": kit.write_jsonl(tmp_path / "train.jsonl", rows),
        "stochastic_depth": 0.5,
        "max_steps": 1,
        "global_batch_size": 4,
        "per_device_batch_size": 2,
    }
    env = kit.where("fsdp2", 2, mixed_precision="no") if sharded else None
    codes, texts = kit.run_command("train.py", *kit.flags(**values), folder=tmp_path / "run", world=2, env=env)
    assert codes == [2, 2]
    assert fix in texts[0]
    assert "encoder_layerdrop" in texts[0]
