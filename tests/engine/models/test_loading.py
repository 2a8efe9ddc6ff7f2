"""Tokenizer, configuration and model: refused if they do not fit together."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.models.build_model import build_model
from engine.models.config_and_tokenizer import check_fit, load_config, load_text_encoder, load_tokenizer
from tests.helpers import kit

LM, CLASSIFIER = AutoModelForCausalLM, AutoModelForSequenceClassification


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """A folder with a tokenizer of 258 tokens."""
    return str(kit.tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), size=258))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """A folder with a saved Llama."""
    return str(kit.save_model(tmp_path_factory.mktemp("saved"), kit.LLAMA))


def pretrained(folder, auto_class=LM, weights=None, new_weights=(), num_labels=2):
    cfg = RunConfig(model_name_or_path=str(folder))
    config = load_config(cfg, None)
    config.num_labels = num_labels
    return build_model(cfg, config, auto_class, weights, new_weights)


def config_file(folder, **values) -> RunConfig:
    return RunConfig(model_config=str(kit.write_yaml(folder / "model.yaml", values)))


def test_weights_of_16_bits_are_warned_about(files, capsys):
    cfg = RunConfig(model_config=str(files / "llama.yaml"), dtype="bfloat16")
    model = build_model(cfg, load_config(cfg, None), LM)
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    assert "warning: dtype is bfloat16" in capsys.readouterr().err


def test_missing_weights_are_refused_except_a_new_head(saved, tmp_path):
    with pytest.raises(UsageError, match=r"for 1 parameters of LlamaForSequenceClassification, first score"):
        pretrained(saved, CLASSIFIER)
    pretrained(saved, CLASSIFIER, new_weights=("score",)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="first score"):  # a checkpoint has its head
        pretrained(saved, CLASSIFIER, weights=saved, new_weights=("score",))
    five = pretrained(tmp_path, CLASSIFIER, new_weights=("score",), num_labels=5)
    assert five.score.weight.shape[0] == 5
    with pytest.raises(UsageError, match="first score"):
        pretrained(tmp_path, CLASSIFIER, num_labels=5)


def test_folder_with_an_adapter_is_refused(saved, tmp_path):
    """transformers would add the adapter only where peft is installed, and then freeze the model."""
    shutil.copytree(saved, tmp_path / "model")
    (tmp_path / "model/adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds an adapter of the package peft.*: merge it"):
        pretrained(tmp_path / "model")


def test_folder_of_a_run_is_refused_by_the_name_of_its_final_model(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run/final")
    with pytest.raises(UsageError, match=r"^model_name_or_path: .*run is the folder of a run: give .*run/final,"):
        pretrained(tmp_path / "run")


@pytest.mark.parametrize("part", [None, "text_config"])
def test_quantized_models_are_refused(saved, tmp_path, part):
    """transformers needs a package for each method, and puts integers into the weights."""
    folder = shutil.copytree(saved, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    config |= {part: quantized} if part else quantized
    (folder / "config.json").write_text(json.dumps(config))
    message = "is a quantized model .quantization_config: bitsandbytes"
    with pytest.raises(UsageError, match=f"^model_name_or_path: .*{message}"):
        pretrained(folder)
    with pytest.raises(UsageError, match=message):  # init_from
        pretrained(saved, weights=str(folder))
    with pytest.raises(UsageError, match=f"^model_config: .*{message}"):
        load_config(config_file(tmp_path, **kit.LLAMA | quantized), None)


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "roberta"])
def test_decoder_takes_the_padding_of_the_tokenizer(tokenizer, tmp_path, model_type):
    """It classifies at the last token that is no padding. Positions of RoBERTa begin after the padding of its weights."""
    part = {"vocab_size": 300, "pad_token_id": 7}
    cfg = config_file(tmp_path, model_type=model_type, **({"text_config": part} if model_type == "gemma3" else part))
    config = load_text_encoder(replace(cfg, tokenizer_name=tokenizer), 32)[2]
    assert config.get_text_config().pad_token_id == (7 if model_type == "roberta" else 1)


def test_random_model_gets_vocabulary_and_special_ids_from_the_tokenizer(tokenizer, tmp_path):
    words = load_tokenizer(RunConfig(tokenizer_name=tokenizer))
    values = {name: value for name, value in kit.LLAMA.items() if name != "vocab_size"}
    config = load_config(config_file(tmp_path, **values), words)
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id, config.bos_token_id) == (258, 0, 1, None)
    config = load_config(config_file(tmp_path, **values, vocab_size=300, eos_token_id=5), words)
    assert (config.vocab_size, config.eos_token_id) == (300, 5)  # the file wins


def test_length_and_vocabulary_must_fit(files, tokenizer, tmp_path):
    cfg = RunConfig(model_config=str(files / "llama.yaml"), tokenizer_name=tokenizer)
    config, words = load_config(cfg, None), load_tokenizer(cfg)
    assert check_fit(cfg, config, words, None) == 256  # the model's limit
    with pytest.raises(UsageError, match=r"max_length is 257, but .* has 256 positions: give at most --max_length 256"):
        check_fit(cfg, config, words, 257)
    config.vocab_size = 257
    with pytest.raises(UsageError, match=r"vocab_size is 257, but the tokenizer .* has 258 tokens"):
        check_fit(cfg, config, words, 10)
    # Positions of RoBERTa begin after the padding index.
    cfg = config_file(tmp_path, model_type="roberta", vocab_size=50, max_position_embeddings=34)
    assert check_fit(cfg, load_config(cfg, None), None, None) == 32


def test_encoder_as_language_model_does_not_see_the_future(tmp_path):
    from src.tasks.causal_lm import Options, Task

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    task = Task(config_file(tmp_path, model_type="bert", vocab_size=50, **sizes), Options())
    task.load()

    def first_logits():
        ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 9]])
        return task.build().eval()(input_ids=ids, use_cache=False).logits[:, :3]

    torch.testing.assert_close(*first_logits())
    task.config.is_decoder = False  # the mutant: as transformers gives it
    assert not torch.allclose(*first_logits())


def test_layerdrop_is_switched_off(tmp_path, capsys):
    """Ranks would wait for each other's layers."""
    bart = load_config(config_file(tmp_path, model_type="bart", encoder_layerdrop=0.5), None)
    assert bart.encoder_layerdrop == 0
    assert "encoder_layerdrop is 0.5" in capsys.readouterr().err
