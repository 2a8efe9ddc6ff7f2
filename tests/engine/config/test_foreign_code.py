"""A checkpoint, a model, a dataset and the working directory are data: none of them runs code or chooses where files go."""

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

from engine.checkpointing import locate_weights
from engine.checkpointing.locate_weights import evaluation_args
from engine.config import parsing, validation
from engine.config.errors import UsageError
from engine.config.option import declared_options, is_from_checkpoint, option
from engine.config.run_config import RunConfig
from engine.find_tasks import OPTIONS, make_task
from engine.models.config_and_tokenizer import load_tokenizer
from engine.storage import verify_hashes
from src.losses.metrics import check_metrics
from src.tasks import causal_lm
from tests.helpers import kit

EVIL = {
    "trust_remote_code": True,
    "output_dir": "/evil/output",
    "cache_dir": "/evil/cache",
    "report_to": ["wandb"],
    "push_to_hub": True,
    "init_from": "/evil/run",
    "tokenizer_name": "evil/tokenizer",
    "model_name_or_path": "evil/model",
    "optim": "evil.Optimizer",
    "chat_template": "/evil/template",
    "techniques": {"evil": None},
}
CHECKPOINT = "checkpoints/step_00000003"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps with an evaluation, which can be resumed."""
    folder = tmp_path_factory.mktemp("trained")
    fields = kit.tiny_files(folder) | {"max_steps": 3, "dtype": "float64", "lr_scheduler_type": "constant"}
    return kit.run_training(1, folder / "run", *kit.flags(**fields))


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(trained.folder, tmp_path / "run"))


@pytest.fixture
def marker(tmp_path):
    """A file that evil code creates; the test fails if it exists afterwards."""
    file = tmp_path / "executed"
    yield file
    assert not file.exists()


def code(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()\n"


def parse(**fields):
    return parsing.parse(kit.flags(**fields), OPTIONS)


def parse_evaluation(*argv):
    """Return (cfg, options, step) of eval.py."""
    rest, base, step = evaluation_args([str(word) for word in argv])
    return *parsing.parse(rest, OPTIONS, base), step


def claim(checkpoint: Path, **fields) -> Path:
    """Put fields into the configuration that a checkpoint records, under an intact manifest."""
    files = {name: checkpoint / name for name in verify_hashes.read_manifest(checkpoint)["files"]}
    state = json.loads(files["state.json"].read_text())
    state["config"] |= fields
    files["state.json"].write_text(json.dumps(state))
    (checkpoint / verify_hashes.MANIFEST).write_text(verify_hashes.manifest_text(files, {}, {"step": 3}))
    assert verify_hashes.verify(checkpoint) == []
    return checkpoint


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_harmful_fields_of_a_checkpoint_are_not_used(run, capsys):
    checkpoint = claim(run / CHECKPOINT, **EVIL)
    shutil.rmtree(run / "final")
    cfg, options, step = parse_evaluation("--checkpoint", run)
    assert "evil" not in json.dumps([vars(cfg), vars(options)])
    assert (cfg.trust_remote_code, getattr(cfg, "push_to_hub", False), cfg.report_to) == (False, False, [])
    assert (cfg.output_dir, step) == (str(run), 3)
    warnings = capsys.readouterr().err
    for flag in ("--trust_remote_code true", "--cache_dir /evil/cache"):
        assert flag in warnings
    assert parse_evaluation("--checkpoint", checkpoint, "--trust_remote_code", "true")[0].trust_remote_code


@pytest.mark.parametrize("mutant", [False, True])
def test_new_text_option_needs_from_checkpoint(run, capsys, monkeypatch, mutant):
    """Two texts and a number of a fork. The mutant takes every field, whatever its type."""

    @dataclass
    class Options(causal_lm.Options):
        script: str = option("a new text", "none")
        column: str = option("a new text that is declared harmless", "none", from_checkpoint=True)
        count: int = option("a new number", 1)

    monkeypatch.setitem(OPTIONS, "causal_lm", lambda: Options)
    if mutant:
        monkeypatch.setattr(locate_weights, "is_from_checkpoint", lambda rules: True)
    claim(run / CHECKPOINT, script="/evil/script", column="of the run", count=2)
    options = parse_evaluation("--checkpoint", run / CHECKPOINT)[1]
    assert (options.column, options.count) == ("of the run", 2)
    assert options.script == ("/evil/script" if mutant else "none")
    assert ("--script /evil/script" in capsys.readouterr().err) != mutant
    assert parse_evaluation("--checkpoint", run / CHECKPOINT, "--script", "mine")[1].script == "mine"


def test_numbers_bools_and_choices_may_come_from_a_checkpoint():
    @dataclass
    class Fields:
        integer: int = option("", 1)
        number: float | None = option("")
        flag: bool = option("", False)
        choice: str = option("", "a", choices=("a", "b"))
        number_or_word: int | Literal["auto"] = option("", 1)
        text: str = option("", "a")
        text_or_number: str | int | None = option("")
        texts: list[str] = option("", [])
        numbers: list[float] = option("", [])
        mapping: dict | None = option("")
        harmless: str = option("", "a", from_checkpoint=True)
        code: bool = option("", False, from_checkpoint=False)

    taken = {name for name, rules in declared_options(Fields).items() if is_from_checkpoint(rules)}
    assert taken == {"integer", "number", "flag", "choice", "number_or_word", "harmless"}
    may_run_code_or_write = ("trust_remote_code", "cache_dir", "cache_per_node", "output_dir", "report_to")
    assert not any(is_from_checkpoint(declared_options(RunConfig)[name]) for name in may_run_code_or_write)


def test_number_of_a_checkpoint_is_no_text(run):
    claim(run / CHECKPOINT, max_eval_examples="/evil/file")
    with pytest.raises(UsageError, match="max_eval_examples: '/evil/file'"):
        parse_evaluation("--checkpoint", run / CHECKPOINT)


@pytest.mark.parametrize("name", ["validation_file", "dataset_name"])
def test_other_data_has_no_revision_of_the_data_of_the_run(run, name):
    claim(run / CHECKPOINT, dataset_name="org/data", dataset_revision="v1", train_file=[])
    cfg, options, _ = parse_evaluation("--checkpoint", run / CHECKPOINT, f"--{name}", "other")
    assert cfg.dataset_revision is None
    validation.check(cfg, options, training=False)


def test_files_of_folders_above_are_not_read(run, trained):
    for folder in (run.parent, run, run / "checkpoints"):
        kit.write_yaml(folder / "config.yaml", EVIL | {"seed": 666, "validation_file": ["/evil.jsonl"]})
    for name in (CHECKPOINT, "final"):
        cfg = parse_evaluation("--checkpoint", run / name)[0]
        assert (cfg.seed, cfg.trust_remote_code) == (42, False)
        assert cfg.validation_file == parse_evaluation("--checkpoint", trained.folder)[0].validation_file


@pytest.mark.parametrize("typed, where", [("run/final", "run"), (f"run/{CHECKPOINT}", "run"), ("link", "link")])
def test_folder_of_eval_json_follows_from_the_typed_path(run, tmp_path, monkeypatch, typed, where):
    (tmp_path / "link").symlink_to(shutil.copytree(run / "final", tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    for name in (typed, tmp_path / typed):
        assert parse_evaluation("--checkpoint", name)[0].output_dir == str(tmp_path / where)


def test_moved_final_model_is_evaluated(trained, run, tmp_path):
    moved = Path(shutil.move(run / "final", tmp_path / "published"))
    (moved / "eval.json").symlink_to(tmp_path / "outside")
    codes, texts = kit.run_command("eval.py", "--checkpoint", moved, folder=tmp_path)
    assert codes == [0], texts
    assert json.loads((moved / "eval.json").read_text()) == trained.kind("eval")[-1]
    assert not (tmp_path / "outside").exists()  # the link is replaced, not followed
    assert verify_hashes.verify(moved) == []


def test_workers_and_time_limits_are_those_of_this_machine(run):
    """A number is taken from a checkpoint, unless its field says no: another's 256 workers would be started here."""
    own = {"dataloader_num_workers": 200, "preprocessing_num_workers": 200, "ddp_timeout": 1, "dataloader_timeout": 1}
    claim(run / CHECKPOINT, per_device_eval_batch_size=3, **own)
    cfg = parse_evaluation("--checkpoint", run / CHECKPOINT)[0]
    assert cfg.per_device_eval_batch_size == 3
    assert {name: getattr(cfg, name) for name in own} == {name: getattr(type(cfg), name) for name in own}


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["https://h/x.jsonl::local://y", "local:///x.jsonl"])  # stores that run code
@pytest.mark.parametrize("name", ["validation_file", "mixture"])
def test_checkpoint_may_name_only_plain_data(run, capsys, name, file):
    value = [file] if name == "validation_file" else {"a": {"train_file": file}, "b": {"train_file": "b.jsonl"}}
    claim(run / CHECKPOINT, **{name: value})
    cfg = parse_evaluation("--checkpoint", run / CHECKPOINT)[0]
    assert file not in json.dumps(vars(cfg))
    assert f"to use it, give --{name}" in capsys.readouterr().err


def test_metrics_and_kernels_of_a_checkpoint_run_no_foreign_code(run):
    kit.need_task("text_classification")
    kit.need_addon("metrics/evaluate")  # without it, no metric of another place is loaded at all
    claim(run / CHECKPOINT, task="text_classification", metrics=["f1", "none"], attn_implementation="evil/kernel")
    cfg, options, _ = parse_evaluation("--checkpoint", run / CHECKPOINT)
    assert options.metrics == ["f1", "none"]
    with pytest.raises(UsageError, match=r"attn_implementation is evil/kernel.*--trust_remote_code true"):
        validation.check(cfg, options, training=False)
    with pytest.raises(UsageError, match=r"metrics.*trust_remote_code"):
        check_metrics(["./f1"], cfg.trust_remote_code)


# ---- models and data -------------------------------------------------------------------------------------------------


class Pickled:
    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return exec, (self.text,)


def spoil(kind: str, folder: Path, marker: Path) -> None:
    """Put evil code of a kind into a model folder."""

    def change(name: str, **fields):
        file = folder / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | fields))

    evil = folder / "evil.py"
    evil.write_text(code(marker) + "from transformers import GPT2Config as C, GPT2LMHeadModel as M, GPT2Tokenizer as T")
    if kind == "model":
        change("config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}, model_type="evil")
    elif kind == "tokenizer":
        change("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}, tokenizer_class="T")
    elif kind == "pickle":
        (folder / "model.safetensors").unlink()
        torch.save({"weight": Pickled(code(marker))}, folder / "pytorch_model.bin")
    else:
        change("config.json", **{kind: "evil/kernel"})


@pytest.mark.parametrize(
    "kind, refused",
    [
        ("model", "custom code"),
        ("tokenizer", "tokenizer"),
        ("pickle", "could not be built"),
        ("attn_implementation", "attn_implementation.*trust_remote_code"),
        ("_attn_implementation", "attn_implementation.*trust_remote_code"),
    ],
)
def test_model_folder_runs_no_code(trained, tmp_path, marker, kind, refused):
    folder = Path(shutil.copytree(trained.folder / "final", tmp_path / "model"))
    spoil(kind, folder, marker)

    def build(**more):
        task = make_task(*parse(model_name_or_path=folder, train_file="x.jsonl", **more))
        task.load()
        task.build()

    with pytest.raises(UsageError, match=refused):
        build()
    if "attn" in kind:
        build(attn_implementation="sdpa")


@pytest.mark.parametrize("name, inside", [("vocab", str), ("init_inputs", lambda path: [str(path)])])
def test_tokenizer_reads_no_other_file(tmp_path, name, inside):
    """transformers would read it as a vocabulary, and each checkpoint would hold it."""
    (tmp_path / "secret").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ntoken")
    fields = {"tokenizer_class": "BertTokenizer", name: inside(tmp_path / "secret")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(UsageError, match=r"tokenizer_config.json: vocab, merges or init_inputs names a file"):
        load_tokenizer(parse(tokenizer_name=tmp_path, train_file="x.jsonl")[0])


def test_attention_kernels_of_the_hub_need_opt_in(tmp_path):
    evil = {"attn_implementation": "evil/kernel"}
    with pytest.raises(UsageError, match=r"attn_implementation.*trust_remote_code"):
        validation.check(*parse(model_config="x.yaml", train_file="x.jsonl", **evil))
    validation.check(*parse(model_config="x.yaml", train_file="x.jsonl", trust_remote_code=True, **evil))
    part = {"model_type": "llava", "attn_implementation": {"text_config": "evil/kernel"}}
    model = kit.write_yaml(tmp_path / "model.yaml", part)
    with pytest.raises(UsageError, match=r"attn_implementation.*trust_remote_code"):
        make_task(*parse(model_config=model, train_file="x.jsonl")).load()


TEMPLATE = "{{{{ cycler.__init__.__globals__.os.system('touch {}') }}}}"


def evil_dataset(kind: str, split: str, folder: Path, marker: Path) -> Path:
    """Return a dataset folder with a `split` that names evil data, or that holds evil code."""
    rows = [{"input_ids": [1, 2, 3]}] * 20
    data = folder / "data"
    data.mkdir()
    kit.write_jsonl(data / "train.jsonl", rows)
    kit.write_jsonl(folder / "outside.jsonl", rows)
    templates = {"templates": {"u": TEMPLATE.format(marker)}, "refs": {"x.jsonl": ["{{u}}", 0, 1]}}
    (folder / "reference.jsonl").write_text(json.dumps({"version": 1} | templates))
    path = {
        "outside": "../outside.jsonl",
        "local": f"local://{folder}/outside.jsonl",
        "reference": f"reference://x.jsonl::file://{folder}/reference.jsonl",
    }[kind]
    paths = {"train": "train.jsonl"} | {split: path}
    files = "".join(f"  - split: {name}\n    path: '{path}'\n" for name, path in paths.items())
    (data / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n")
    return data


@pytest.mark.parametrize("split, streaming", [("train", False), ("test", False), ("train", True)])
@pytest.mark.parametrize("kind", ["outside", "local", "reference"])
def test_dataset_folder_runs_no_code(tmp_path, marker, kind, split, streaming):
    if streaming:
        kit.need_addon("streaming")
    model = kit.write_yaml(tmp_path / "model.yaml", kit.TINY)
    fields = {"model_config": model, "dataset_name": evil_dataset(kind, split, tmp_path, marker)}
    fields |= {"streaming": True, "max_steps": 1} if streaming else {}
    with pytest.raises(UsageError, match="dataset_name"):
        kit.open_data(cache_dir=tmp_path / "cache", **fields)


def test_data_on_disk_is_read_from_its_folder(tmp_path):
    from datasets import Dataset

    for name in ("data", "other"):
        Dataset.from_list([{"input_ids": [1, 2, 3]}] * 20).save_to_disk(tmp_path / name)
    [arrow], file = (tmp_path / "other").glob("*.arrow"), tmp_path / "data" / "state.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"_data_files": [{"filename": f"../other/{arrow.name}"}]})
    )
    model = kit.write_yaml(tmp_path / "model.yaml", kit.TINY)
    with pytest.raises(UsageError, match=r"dataset_name: .*other.*, which is not in this folder"):
        kit.open_data(cache_dir=tmp_path / "cache", model_config=model, dataset_name=tmp_path / "data")


def test_data_on_disk_with_wrong_offsets_is_refused(tmp_path):
    """Reading them would show other memory of the process, or end it without a word."""
    from datasets import Dataset

    Dataset.from_dict({"text": ["abcd"] * 20}).save_to_disk(tmp_path / "data")
    [file], offsets = (tmp_path / "data").glob("*.arrow"), struct.pack("<21i", *range(0, 84, 4))
    content = file.read_bytes()
    assert offsets in content
    file.write_bytes(content.replace(offsets, offsets[:-4] + struct.pack("<i", 4000)))
    model, tokenizer = (
        kit.write_yaml(tmp_path / "m.yaml", kit.LLAMA),
        kit.tiny_tokenizer(tmp_path / "tokenizer", ["a b"]),
    )
    with pytest.raises(UsageError, match=r"dataset_name: .*offset"):
        kit.open_data(
            cache_dir=tmp_path / "cache", model_config=model, tokenizer_name=tokenizer, dataset_name=tmp_path / "data"
        )


def test_reference_file_is_refused_before_it_is_opened(tmp_path):
    model = kit.write_yaml(tmp_path / "model.yaml", kit.TINY)
    with pytest.raises(UsageError, match="reference:// is refused"):
        kit.open_data(model_config=model, train_file="reference://x.jsonl::file:///reference.json")


def test_chat_template_runs_no_code(tmp_path, marker):
    template = TEMPLATE.format(marker)
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", ["a b"], chat_template=template)
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 20
    file = kit.write_jsonl(tmp_path / "chat.jsonl", rows)
    model = kit.write_yaml(tmp_path / "model.yaml", kit.LLAMA)
    with pytest.raises(UsageError, match="template"):
        kit.open_data(model_config=model, tokenizer_name=tokenizer, train_file=file, cache_dir=tmp_path / "cache")


# ---- what is published -----------------------------------------------------------------------------------------------


def test_model_card_holds_no_paths(trained):
    """And no query strings: tests/engine/config/test_redact.py."""
    card = (trained.folder / "final" / "README.md").read_text()
    assert "train.jsonl" in card
    assert str(trained.folder.parent) not in card
