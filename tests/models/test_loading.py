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


def random(files, **fields):
    cfg = RunConfig(model_config=str(files / "llama.yaml"), **fields)
    return build_model(cfg, load_config(cfg, None), LM)


def pretrained(folder, auto_class=LM, weights=None, new_weights=(), change=None, **fields):
    cfg = RunConfig(model_name_or_path=str(folder), **fields)
    config = load_config(cfg, None)
    for name, value in (change or {}).items():
        setattr(config, name, value)
    return build_model(cfg, config, auto_class, weights, new_weights)


def config_file(folder, **values) -> RunConfig:
    return RunConfig(model_config=str(kit.write_yaml(folder / "model.yaml", values)))


# ---- configurations ----------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
SAVED = {"architectures": ["SomeModel"], "transformers_version": "4.40.1", "torch_dtype": "bfloat16", "use_cache": True}
# The fields of published models, smaller. Later versions of transformers renamed or removed some of them.
PUBLISHED = {
    "llama": SIZES
    | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128_256, "max_position_embeddings": 131_072}
    | {"rope_theta": 500_000.0, "rope_scaling": LLAMA_3 | {"rope_type": "llama3"}, "bos_token_id": 128_000}
    | {"eos_token_id": [128_001, 128_008], "pretraining_tp": 1, "mlp_bias": False, "rms_norm_eps": 1e-05}
    | {"is_llama_config": True, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    "qwen2": SIZES
    | {
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
        "sliding_window": 32_768,
        "max_window_layers": 24,
        "use_mrope": False,
    },
    "mistral": SIZES | {"rope_theta": 10_000.0, "sliding_window": 4096, "num_key_value_heads": 2},
    "phi": SIZES | {"partial_rotary_factor": 0.4, "rope_theta": 10_000.0, "qk_layernorm": False},
    "gpt_neox": SIZES | {"rotary_emb_base": 10_000, "rotary_pct": 0.25, "use_parallel_residual": True},
    "gpt2": {"n_ctx": 1024, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 1024, "resid_pdrop": 0.1},
    "bert": SIZES | {"position_embedding_type": "absolute", "layer_norm_eps": 1e-12, "type_vocab_size": 2},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "bias_dropout_fusion": True, "hidden_dropout": 0.0},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "time_step_limit": [0.0, float("inf")]},
    "deberta-v2": SIZES | {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_buckets": 256},
    "gemma2": SIZES | {"final_logit_softcapping": 30.0, "cache_implementation": "hybrid", "rope_theta": 10_000.0},
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_config_is_read_as_autoconfig_reads_it(tmp_path, model_type):
    values = {"model_type": model_type} | PUBLISHED[model_type]
    values |= {} if model_type == "deberta-v2" else SAVED  # its config.json says neither
    (tmp_path / "config.json").write_text(json.dumps(values))  # with numbers such as 1e-05, which are text in YAML 1.1
    ours = load_config(RunConfig(model_config=str(tmp_path / "config.json")), None).to_dict()
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    added = {"architectures", "transformers_version", "_name_or_path"}
    assert {k: v for k, v in ours.items() if k not in added} == {k: v for k, v in theirs.items() if k not in added}


def test_names_that_transformers_converts_are_fields_of_a_file_of_ones_own(tmp_path, capsys):
    config = load_config(config_file(tmp_path, model_type="llama", rope_theta=500_000.0, **SIZES), None)
    assert config.rope_parameters["rope_theta"] == 500_000.0
    assert capsys.readouterr().err == ""
    with pytest.raises(UsageError, match=r"model.yaml: rope_thetas: llama has no such field"):
        load_config(config_file(tmp_path, model_type="llama", rope_thetas=500_000.0, **SIZES), None)


def test_fields_without_effect_in_a_published_config_are_named(tmp_path, capsys):
    load_config(config_file(tmp_path, model_type="llama", is_llama_config=True, **SIZES, **SAVED), None)
    assert "llama has no field is_llama_config" in capsys.readouterr().err


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_random_weights_are_those_of_the_seed(files):
    first = random(files, seed=1).state_dict()
    torch.rand(7)  # other random numbers in between
    assert kit.same(first, random(files, seed=1).state_dict())
    assert not kit.same(first, random(files, seed=2).state_dict())


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_weights_have_the_dtype_of_the_run(files, saved, dtype, capsys):
    for model in (random(files, dtype=dtype), pretrained(saved, dtype=dtype)):
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
        assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert capsys.readouterr().err.count("warning: dtype is bfloat16") == 2 * (dtype == "bfloat16")


def test_saved_model_is_loaded_bitwise(files, saved):
    weights = random(files, seed=3).state_dict()
    assert kit.same(pretrained(saved).state_dict(), weights)
    cfg = RunConfig(model_config=str(files / "llama.yaml"), seed=4)  # a checkpoint replaces the run's own start
    assert kit.same(build_model(cfg, load_config(cfg, None), LM, weights=str(saved)).state_dict(), weights)


def test_missing_weights_are_refused_except_a_new_head(saved):
    with pytest.raises(UsageError, match=r"no weights for 1 parameters of LlamaForSequenceClassification, first score"):
        pretrained(saved, CLASSIFIER)
    model = pretrained(saved, CLASSIFIER, new_weights=("score",))
    assert model.score.weight.shape[0] == model.config.num_labels
    with pytest.raises(UsageError, match="first score"):  # a checkpoint has its head
        pretrained(saved, CLASSIFIER, weights=str(saved), new_weights=("score",))


def test_weights_of_another_shape_are_refused_except_a_new_head(saved, tmp_path):
    with pytest.raises(UsageError, match=r"no weights for 6 parameters.*mlp.*\[32, 64\] in the file, \[32, 96\]"):
        pretrained(saved, change={"intermediate_size": 96})
    pretrained(saved, CLASSIFIER, new_weights=("score",)).save_pretrained(tmp_path)
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


def test_source_of_the_tokenizer(tokenizer, saved, tmp_path):
    assert load_tokenizer(RunConfig(model_config="x")) is None
    assert load_tokenizer(RunConfig(model_name_or_path=str(saved))) is None  # enough for rows of input_ids
    both = shutil.copytree(saved, tmp_path / "both")
    shutil.copytree(tokenizer, both, dirs_exist_ok=True)
    assert len(load_tokenizer(RunConfig(model_name_or_path=str(both)))) == 37
    with pytest.raises(UsageError, match="tokenizer_name: no tokenizer could be loaded from"):
        load_tokenizer(RunConfig(model_name_or_path=str(both), tokenizer_name=str(saved)))


def test_fingerprint_of_a_tokenizer(tokenizer):
    one, other = (load_tokenizer(RunConfig(tokenizer_name=tokenizer)) for _ in range(2))
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(other)
    other.add_tokens(["new"])
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)


def test_length_and_vocabulary_must_fit(files, tokenizer):
    cfg = RunConfig(model_config=str(files / "llama.yaml"), tokenizer_name=tokenizer)
    config, words = load_config(cfg, None), load_tokenizer(cfg)
    assert check_fit(cfg, config, words, None, LM) == 256  # the model's limit
    assert check_fit(cfg, config, None, 256, LM) == 256
    with pytest.raises(UsageError, match=r"max_length is 257, but .* has 256 positions: give at most --max_length 256"):
        check_fit(cfg, config, words, 257, LM)
    config.vocab_size = 37
    assert check_fit(cfg, config, words, 10, LM) == 10
    config.vocab_size = 36
    with pytest.raises(UsageError, match=r"vocab_size is 36, but the tokenizer .* has 37 tokens"):
        check_fit(cfg, config, words, 10, LM)


def test_positions_of_roberta_begin_after_the_padding_index(tmp_path):
    cfg = config_file(tmp_path, model_type="roberta", vocab_size=50, max_position_embeddings=34)
    assert check_fit(cfg, load_config(cfg, None), None, None, LM) == 32
    with pytest.raises(UsageError, match="--max_length 32"):
        check_fit(cfg, load_config(cfg, None), None, 33, LM)


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
