"""Tokenizer, configuration and model: they fit together or are refused, and random weights come from the seed alone."""

import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.models.build_model import build_model
from src.models.load_config import check_fit, load_config
from src.models.load_tokenizer import load_tokenizer, tokenizer_fingerprint
from tests.helpers import kit

CLASSIFIER = AutoModelForSequenceClassification


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


def random(files, name="llama.yaml", **fields):
    run = RunConfig(model_config=str(files / name), **fields)
    return build_model(run, load_config(run, None), AutoModelForCausalLM)


def pretrained(folder, auto_class=AutoModelForCausalLM, new_weights=(), **fields):
    run = RunConfig(model_name_or_path=str(folder), **fields)
    return build_model(run, load_config(run, None), auto_class, new_weights=new_weights)


def test_random_weights_are_those_of_the_seed(files):
    first = random(files, seed=1).state_dict()
    torch.rand(7)  # whatever else was drawn
    assert kit.same(first, random(files, seed=1).state_dict())
    assert not kit.same(first, random(files, seed=2).state_dict())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_have_the_dtype_of_the_run(files, saved, dtype):
    for model in (random(files, dtype=dtype), pretrained(saved, dtype=dtype)):
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
        assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_bfloat16_weights_are_warned_about(files, capsys):
    model = random(files, dtype="bfloat16")
    assert "warning: dtype is bfloat16: weights without a float32 copy" in capsys.readouterr().err
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_saved_model_comes_back_to_the_last_bit(files, saved):
    assert kit.same(pretrained(saved).state_dict(), random(files, seed=3).state_dict())


def test_a_checkpoint_wins_over_the_start_of_the_run(files, saved):
    run = RunConfig(model_config=str(files / "llama.yaml"), seed=4)
    model = build_model(run, load_config(run, None), AutoModelForCausalLM, weights=str(saved))
    assert kit.same(model.state_dict(), random(files, seed=3).state_dict())


def test_missing_weights_are_refused_but_for_a_new_head(saved):
    with pytest.raises(UsageError, match=r"no weights for 1 parameters of LlamaForSequenceClassification, first score"):
        pretrained(saved, CLASSIFIER)
    model = pretrained(saved, CLASSIFIER, new_weights=("score",))
    assert model.score.weight.shape[0] == model.config.num_labels


def test_a_checkpoint_has_every_weight_also_of_a_head(saved):
    run = RunConfig(model_name_or_path=str(saved))
    with pytest.raises(UsageError, match="first score"):
        build_model(run, load_config(run, None), CLASSIFIER, weights=str(saved), new_weights=("score",))


def test_weights_of_another_shape_are_refused_but_for_a_new_head(saved, tmp_path):
    run = RunConfig(model_name_or_path=str(saved))
    wide = load_config(run, None)
    wide.intermediate_size = 96
    with pytest.raises(UsageError, match=r"no weights for 6 parameters.*mlp.*shape \[.*\] in the file, \["):
        build_model(run, wide, AutoModelForCausalLM)
    pretrained(saved, CLASSIFIER, new_weights=("score",)).save_pretrained(tmp_path)
    more = load_config(RunConfig(model_name_or_path=str(tmp_path)), None)
    more.num_labels = 5
    run = RunConfig(model_name_or_path=str(tmp_path))
    assert build_model(run, more, CLASSIFIER, new_weights=("score",)).score.weight.shape[0] == 5
    with pytest.raises(UsageError, match="first score"):
        build_model(run, more, CLASSIFIER)


def test_a_random_model_takes_vocabulary_and_special_ids_from_the_tokenizer(tokenizer, tmp_path):
    values = {name: value for name, value in kit.LLAMA.items() if name != "vocab_size"}
    run = RunConfig(model_config=str(kit.write_yaml(tmp_path / "m.yaml", values)), tokenizer_name=tokenizer)
    config = load_config(run, load_tokenizer(run))
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id, config.bos_token_id) == (37, 1, 2, None)
    kit.write_yaml(tmp_path / "m.yaml", values | {"vocab_size": 64, "eos_token_id": 5})
    config = load_config(run, load_tokenizer(run))
    assert (config.vocab_size, config.eos_token_id) == (64, 5)  # what the file says, stays


def test_where_the_tokenizer_comes_from(tokenizer, saved, tmp_path):
    assert load_tokenizer(RunConfig(model_config="x")) is None
    assert load_tokenizer(RunConfig(model_name_or_path=str(saved))) is None  # enough for rows of input_ids
    both = shutil.copytree(saved, tmp_path / "both")
    shutil.copytree(tokenizer, both, dirs_exist_ok=True)
    assert len(load_tokenizer(RunConfig(model_name_or_path=str(both)))) == 37
    with pytest.raises(UsageError, match="tokenizer_name: no tokenizer could be loaded from"):
        load_tokenizer(RunConfig(model_name_or_path=str(both), tokenizer_name=str(saved)))


def test_the_text_of_a_tokenizer_tells_it_from_others(tokenizer):
    one, other = (load_tokenizer(RunConfig(tokenizer_name=tokenizer)) for _ in range(2))
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(other)
    other.add_tokens(["new"])
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)


def test_what_does_not_fit_is_refused(files, tokenizer):
    run = RunConfig(model_config=str(files / "llama.yaml"), tokenizer_name=tokenizer)
    config = load_config(run, None)
    words = load_tokenizer(run)
    assert check_fit(run, config, words, None, AutoModelForCausalLM) == 256  # what the model can
    assert check_fit(run, config, None, 256, AutoModelForCausalLM) == 256
    with pytest.raises(UsageError, match=r"max_length is 257, but .* has 256 positions: give at most --max_length 256"):
        check_fit(run, config, words, 257, AutoModelForCausalLM)
    config.vocab_size = 37
    assert check_fit(run, config, words, 10, AutoModelForCausalLM) == 10
    config.vocab_size = 36
    with pytest.raises(UsageError, match=r"vocab_size is 36, but the tokenizer .* has 37 tokens"):
        check_fit(run, config, words, 10, AutoModelForCausalLM)


def test_positions_of_roberta_begin_after_the_padding_index(tmp_path):
    values = {"model_type": "roberta", "vocab_size": 50, "max_position_embeddings": 34}
    run = RunConfig(model_config=str(kit.write_yaml(tmp_path / "m.yaml", values)))
    assert check_fit(run, load_config(run, None), None, None, AutoModelForCausalLM) == 32
    with pytest.raises(UsageError, match="--max_length 32"):
        check_fit(run, load_config(run, None), None, 33, AutoModelForCausalLM)


def test_an_encoder_that_learns_to_predict_does_not_see_what_comes(tmp_path):
    from src.tasks.causal_lm import Options, Task

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    path = kit.write_yaml(tmp_path / "m.yaml", {"model_type": "bert", "vocab_size": 50} | sizes)
    task = Task(RunConfig(model_config=str(path)), Options())
    task.load()

    def first_logits(model):
        model.eval()
        ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 9]])
        return model(input_ids=ids, use_cache=False).logits[:, :3]

    one, other = first_logits(task.build())
    torch.testing.assert_close(one, other)
    task.config.is_decoder = False  # the mutant: as transformers gives it
    one, other = first_logits(task.build())
    assert not torch.allclose(one, other)


@pytest.mark.parametrize(
    "dtype, precision, warned", [("bfloat16", "fp16", True), ("bfloat16", "bf16", False), ("float32", "fp16", False)]
)
def test_a_bfloat16_model_in_float16_is_warned_about(capsys, dtype, precision, warned):
    """A CPU refuses fp16, so the accelerator is a stand-in here."""
    from types import SimpleNamespace

    from src.config.schema import RunConfig
    from src.distributed.strategies import Strategy

    accelerator = SimpleNamespace(mixed_precision=precision, parallelism_config=None, process_index=0, num_processes=1)
    task = SimpleNamespace(config=SimpleNamespace(dtype=getattr(torch, dtype)), build=lambda weights: "the model")
    assert Strategy(accelerator, RunConfig()).build_model(task, None) == "the model"
    assert ("activations may overflow" in capsys.readouterr().err) == warned
