"""final/ for other programs: the files of the base model, with what the run has changed, in the spelling of earlier versions."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from engine.checkpointing import files_of_base
from engine.config.find_addons import run_config
from engine.models.config_and_tokenizer import load_tokenizer
from engine.storage import verify_hashes
from tests.helpers import kit

CHATML = "{% for m in messages %}<|pad|>{{ m['role'] }}\n{{ m['content'] }}<|endoftext|>\n{% endfor %}"
COPIED = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json")
COPIED += ("chat_template.json", "preprocessor_config.json", "processor_config.json")


def change(file: Path, **values) -> None:
    """Set keys of a JSON file; None removes one."""
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({name: value for name, value in (old | values).items() if value is not None}))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> dict:
    """A run on chats from a base as transformers 4 wrote it, with files that transformers 5 does not write."""
    folder = tmp_path_factory.mktemp("base")
    base = kit.tiny_tokenizer(folder / "base", ["user assistant one two cat"] * 9)
    size = len(AutoTokenizer.from_pretrained(base))
    kit.save_model(base, kit.LLAMA | {"vocab_size": size, "rope_theta": 1e6, "pad_token_id": 1})
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}
    change(base / "config.json", torch_dtype="float32", dtype=None, transformers_version="4.51.0", **rope)
    change(base / "generation_config.json", eos_token_id=[7, 0])
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    decoder = {str(i): {"content": token} | flags for i, token in enumerate(("<|endoftext|>", "<|pad|>"))}
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, "backend": None, "is_local": None}
    change(base / "tokenizer_config.json", added_tokens_decoder=decoder, add_bos_token=True, **own)
    change(base / "special_tokens_map.json", eos_token={"content": "<|endoftext|>"} | flags, pad_token="<|pad|>")
    change(base / "added_tokens.json", **{"<|pad|>": 1})
    change(base / "chat_template.json", chat_template=CHATML)
    change(base / "preprocessor_config.json", image_processor_type="CLIPImageProcessor")
    change(base / "processor_config.json", processor_class="CLIPProcessor")
    (base / "tokenizer.model").write_bytes(b"a model of SentencePiece")
    (folder / "secret").write_text("a token")
    (base / "tekken.json").symlink_to(folder / "secret")
    rows = kit.write_jsonl(folder / "rows.jsonl", [{"text": "one two cat"}] * 4)
    fields = {"model_name_or_path": base, "train_file": rows, "cache_dir": folder / "cache", "max_length": 64}
    return fields | {"global_batch_size": 4, "per_device_batch_size": 4, "max_steps": 2, "save_steps": 1}


def final_of(folder: Path, fields: dict) -> Path:
    return kit.run_training(1, folder, *kit.flags(**fields)).folder / "final"


def test_files_of_the_base_are_copied_and_its_spelling_kept(recipe, tmp_path):
    """Also by a run that was resumed, and by one that begins with that final/: the same files."""
    base = recipe["model_name_or_path"]
    first = final_of(tmp_path / "first", recipe)
    assert "tekken.json is a link" in (tmp_path / "first.out" / "rank0.txt").read_text()
    again = final_of(kit.rewind(tmp_path / "first", 1, tmp_path / "resumed"), recipe)
    second = final_of(tmp_path / "second", recipe | {"model_name_or_path": first})
    for final in (first, again, second):
        for name in COPIED:
            assert (final / name).read_bytes() == (base / name).read_bytes(), name
        assert not (final / "tekken.json").exists()
        values = json.loads((final / "config.json").read_text())
        assert values == json.loads((first / "config.json").read_text())
        assert (values["rope_theta"], values["rope_scaling"]["factor"], values["torch_dtype"]) == (1e6, 2.0, "float32")
        assert AutoConfig.from_pretrained(final).rope_parameters == AutoConfig.from_pretrained(base).rope_parameters
    assert verify_hashes.verify(first) == []


def test_what_the_run_changes_stands_in_each_file(recipe, tmp_path):
    """New tokens, another chat template, and the token that ends a turn, after the end tokens of the base."""
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two cat"}]
    tokens = ["<|im_start|>", "<|im_end|>"]
    rows = kit.write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns}] * 4)
    final = final_of(tmp_path / "run", recipe | {"train_file": rows, "add_tokens": tokens, "chat_template": "chatml"})
    read = {path.name: json.loads(path.read_text()) for path in final.glob("*.json")}
    base = recipe["model_name_or_path"]
    size = len(AutoTokenizer.from_pretrained(base))
    template = (final / "chat_template.jinja").read_text()
    assert template != CHATML
    assert template == read["tokenizer_config.json"]["chat_template"] == read["chat_template.json"]["chat_template"]
    assert read["added_tokens.json"] == {"<|pad|>": 1, tokens[0]: size, tokens[1]: size + 1}
    decoder = read["tokenizer_config.json"]["added_tokens_decoder"]
    assert [decoder[str(i)]["content"] for i in (0, size, size + 1)] == ["<|endoftext|>", *tokens]
    assert read["tokenizer_config.json"]["add_bos_token"] is True
    assert read["generation_config.json"]["eos_token_id"] == [7, 0, size + 1]
    vocabulary = json.loads((base / "tokenizer.json").read_text())["model"]
    assert read["tokenizer.json"]["model"] == vocabulary
    assert (final / "tokenizer.model").read_bytes() == (base / "tokenizer.model").read_bytes()
    expected = [size, *AutoTokenizer.from_pretrained(base)("one").input_ids, size + 1]
    assert AutoTokenizer.from_pretrained(final)("<|im_start|>one<|im_end|>").input_ids == expected
    assert Tokenizer.from_file(str(final / "tokenizer.json")).encode("<|im_start|>one<|im_end|>").ids == expected


def test_special_tokens_that_a_task_sets_stand_in_each_file(recipe, tmp_path, capsys):
    """A mask token, which is a new one, and another padding token; and the chat template as it was written."""
    base = recipe["model_name_or_path"]
    cfg = run_config(model_name_or_path=str(base), cache_dir=str(tmp_path / "cache"))
    tokenizer = load_tokenizer(cfg)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% set thinks = false %}" + CHATML)
    files_of_base.complete_tokenizer(tmp_path, tokenizer, cfg)
    assert "its own files" not in capsys.readouterr().err
    read = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert read["chat_template"] == AutoTokenizer.from_pretrained(tmp_path).chat_template != CHATML
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        values = json.loads((tmp_path / name).read_text())
        assert (values["mask_token"], values["pad_token"]) == ("<mask>", "<|endoftext|>")
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert (found.mask_token_id, found.pad_token_id) == (tokenizer.mask_token_id, 0)


def test_links_within_the_cache_of_the_hub_are_files(tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "c0ffee"
    for folder in (snapshot, repository / "blobs"):
        folder.mkdir(parents=True)
    for name, target in (("tokenizer.model", repository / "blobs" / "1"), ("tekken.json", tmp_path / "secret")):
        target.write_text("text")
        (snapshot / name).symlink_to(target)
    assert files_of_base._files(snapshot, files_of_base.TOKENIZER) == [snapshot / "tokenizer.model"]


def test_tokenizer_that_its_files_would_not_give_here_keeps_those_of_transformers(tmp_path, capsys):
    """Which class reads a tokenizer depends on the configuration beside it: phi3 ignores the class that the file names."""
    base = kit.tiny_tokenizer(tmp_path / "base", ["one two cat"] * 9)
    values = json.loads((base / "tokenizer.json").read_text())
    values |= {"pre_tokenizer": {"type": "Whitespace"}, "decoder": None, "post_processor": None}
    (base / "tokenizer.json").write_text(json.dumps(values))
    change(base / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    cfg = run_config(tokenizer_name=str(base), cache_dir=str(tmp_path / "cache"))
    tokenizer = load_tokenizer(cfg)
    final = tmp_path / "final"
    AutoConfig.for_model("phi3").save_pretrained(final)
    tokenizer.save_pretrained(final)
    files_of_base.complete_tokenizer(final, tokenizer, cfg)
    assert "its own files" in capsys.readouterr().err
    assert AutoTokenizer.from_pretrained(final)("one two").input_ids == tokenizer("one two").input_ids
