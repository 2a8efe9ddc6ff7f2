"""Tokenizer, configuration and model: refused if they do not fit together; random weights depend on the seed alone."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.models.build_model import build_model
from src.models.load_config import check_fit, load_config
from src.models.load_tokenizer import load_tokenizer, tokenizer_fingerprint
from tests.helpers import kit

LM, CLASSIFIER = AutoModelForCausalLM, AutoModelForSequenceClassification


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(37)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def saved(files, tmp_path_factory):
    """A folder with a saved Llama."""
    folder = tmp_path_factory.mktemp("saved")
    random(files, seed=3).save_pretrained(folder)
    return folder


def random(files, weights=None, **fields):
    cfg = RunConfig(model_config=str(files / "llama.yaml"), **fields)
    return build_model(cfg, load_config(cfg, None), LM, weights)


def pretrained(folder, auto_class=LM, weights=None, new_weights=(), change=None, **fields):
    cfg = RunConfig(model_name_or_path=str(folder), **fields)
    config = load_config(cfg, None)
    for name, value in (change or {}).items():
        setattr(config, name, value)
    return build_model(cfg, config, auto_class, weights, new_weights)


def config_file(folder, **values) -> RunConfig:
    return RunConfig(model_config=str(kit.write_yaml(folder / "model.yaml", values)))


# ---- configurations ----------------------------------------------------------------------------------------------------

# The fields of a published Llama, smaller. Later versions of transformers renamed or removed some of them.
PUBLISHED = {
    "model_type": "llama",
    "architectures": ["SomeModel"],
    "transformers_version": "4.40.1",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "rope_theta": 500_000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
    | {"original_max_position_embeddings": 8192},
    "eos_token_id": [128_001, 128_008],
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,  # in JSON without a point, which is text in YAML 1.1
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
}


def test_published_config_is_read_as_autoconfig_reads_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    ours = load_config(RunConfig(model_config=str(tmp_path / "config.json")), None).to_dict()
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    added = {"architectures", "transformers_version", "_name_or_path"}
    assert {k: v for k, v in ours.items() if k not in added} == {k: v for k, v in theirs.items() if k not in added}


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_random_weights_are_those_of_the_seed(files):
    first = random(files, seed=1).state_dict()
    torch.rand(7)  # other random numbers in between
    assert kit.same(first, random(files, seed=1).state_dict())
    assert not kit.same(first, random(files, seed=2).state_dict())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_weights_have_the_dtype_of_the_run(files, saved, dtype, capsys):
    for model in (random(files, dtype=dtype), pretrained(saved, dtype=dtype)):
        assert {(p.dtype, p.device.type) for p in model.parameters()} == {(getattr(torch, dtype), "cpu")}
    assert capsys.readouterr().err.count("warning: dtype is bfloat16") == 2 * (dtype == "bfloat16")


def test_saved_model_is_loaded_bitwise(files, saved):
    weights = random(files, seed=3).state_dict()
    assert kit.same(pretrained(saved).state_dict(), weights)
    # A checkpoint replaces the run's own start.
    assert kit.same(random(files, seed=4, weights=str(saved)).state_dict(), weights)


def test_missing_weights_are_refused_except_a_new_head(saved, tmp_path):
    with pytest.raises(UsageError, match=r"no weights for 1 parameters of LlamaForSequenceClassification, first score"):
        pretrained(saved, CLASSIFIER)
    model = pretrained(saved, CLASSIFIER, new_weights=("score",))
    with pytest.raises(UsageError, match="first score"):  # a checkpoint has its head
        pretrained(saved, CLASSIFIER, weights=str(saved), new_weights=("score",))
    with pytest.raises(UsageError, match=r"no weights for 6 parameters.*mlp.*\[32, 64\] in the file, \[32, 96\]"):
        pretrained(saved, change={"intermediate_size": 96})
    model.save_pretrained(tmp_path)
    five = {"num_labels": 5}
    assert pretrained(tmp_path, CLASSIFIER, new_weights=("score",), change=five).score.weight.shape[0] == 5
    with pytest.raises(UsageError, match="first score"):
        pretrained(tmp_path, CLASSIFIER, change=five)


# ---- tokenizer and configuration -------------------------------------------------------------------------------------


def test_random_model_gets_vocabulary_and_special_ids_from_the_tokenizer(tokenizer, tmp_path):
    words = load_tokenizer(RunConfig(tokenizer_name=tokenizer))
    values = {name: value for name, value in kit.LLAMA.items() if name != "vocab_size"}
    config = load_config(config_file(tmp_path, **values), words)
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id, config.bos_token_id) == (37, 1, 2, None)
    config = load_config(config_file(tmp_path, **values, vocab_size=64, eos_token_id=5), words)
    assert (config.vocab_size, config.eos_token_id) == (64, 5)  # the file wins


def test_source_and_fingerprint_of_the_tokenizer(tokenizer, saved, tmp_path):
    assert load_tokenizer(RunConfig(model_config="x")) is None
    assert load_tokenizer(RunConfig(model_name_or_path=str(saved))) is None  # enough for rows of input_ids
    both = shutil.copytree(saved, tmp_path / "both")
    shutil.copytree(tokenizer, both, dirs_exist_ok=True)
    one, other = (load_tokenizer(RunConfig(model_name_or_path=str(both))) for _ in range(2))
    with pytest.raises(UsageError, match="tokenizer_name: no tokenizer could be loaded from"):
        load_tokenizer(RunConfig(model_name_or_path=str(both), tokenizer_name=str(saved)))
    assert len(one) == 37
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(other)
    other.add_tokens(["new"])
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)


def test_length_and_vocabulary_must_fit(files, tokenizer, tmp_path):
    cfg = RunConfig(model_config=str(files / "llama.yaml"), tokenizer_name=tokenizer)
    config, words = load_config(cfg, None), load_tokenizer(cfg)
    assert check_fit(cfg, config, words, None) == 256  # the model's limit
    assert check_fit(cfg, config, words, 10) == 10
    with pytest.raises(UsageError, match=r"max_length is 257, but .* has 256 positions: give at most --max_length 256"):
        check_fit(cfg, config, words, 257)
    config.vocab_size = 36
    with pytest.raises(UsageError, match=r"vocab_size is 36, but the tokenizer .* has 37 tokens"):
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
