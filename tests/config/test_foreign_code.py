"""A checkpoint, a model, a data set and the working directory are data: nothing of them runs code or chooses where files go."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from src.checkpointing.locate_weights import evaluation_args
from src.config import parsing, validation
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.models.evaluate_metrics import load_metric
from src.storage import atomic_folder
from src.tasks import OPTIONS, make_task
from tests.helpers import kit

EVIL = {
    "trust_remote_code": True,
    "output_dir": "/evil/output",
    "cache_dir": "/evil/cache",
    "report_to": ["wandb"],
    "push_to_hub": True,
    "hub_model_id": "evil/model",
    "init_from": "/evil/run",
    "resume": "/evil/run",
    "tokenizer_name": "evil/tokenizer",
    "model_name_or_path": "evil/model",
    "attn_implementation": "evil/kernel",
    "chat_template": "/evil/template",
    "sample_prompt": "evil",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps with an evaluation."""
    folder = tmp_path_factory.mktemp("trained")
    fields = kit.tiny_files(folder) | {"max_steps": 3, "dtype": "float64", "per_device_eval_batch_size": 5}
    return kit.run_training(1, folder / "run", *kit.flags(**fields))


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(trained.folder, tmp_path / "run"))


@pytest.fixture
def marker(tmp_path):
    """A file that evil code makes, and that must not be there afterwards."""
    file = tmp_path / "executed"
    yield file
    assert not file.exists()


def code(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()\n"


def parsed(*argv):
    """Return what eval.py has to evaluate."""
    rest, base, step = evaluation_args([str(word) for word in argv])
    return *parsing.parse(rest, OPTIONS, base), step


def claim(checkpoint: Path, **fields) -> None:
    """Let a checkpoint's own configuration hold these fields, under an intact manifest."""
    kept = shutil.move(checkpoint, checkpoint.with_name("before"))

    def write(folder):
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        (folder / atomic_folder.MANIFEST).unlink()
        state = json.loads((folder / "state.json").read_text())
        state["config"] |= fields
        (folder / "state.json").write_text(json.dumps(state))

    atomic_folder.publish(checkpoint, write, step=3)
    assert atomic_folder.verify(checkpoint) == []


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_no_field_of_a_checkpoint_that_could_do_harm_is_used(run, capsys):
    checkpoint = run / "checkpoints" / "step_00000003"
    claim(checkpoint, **EVIL)
    for name in (checkpoint, run):
        kit.write_yaml(run / "config.yaml", EVIL)
        found, options, step = parsed("--checkpoint", name)
        assert "evil" not in json.dumps([vars(found), vars(options)])
        assert (found.trust_remote_code, found.push_to_hub, found.report_to) == (False, False, [])
        assert found.output_dir == str(run)
        assert step == 3
        told = capsys.readouterr().err
        for flag in ("--trust_remote_code true", "--cache_dir /evil/cache", "--attn_implementation evil/kernel"):
            assert flag in told
    given = "--trust_remote_code", "true", "--cache_dir", run / "cache"
    assert parsed("--checkpoint", checkpoint, *given)[0].trust_remote_code
    assert "trust_remote_code" not in capsys.readouterr().err


def test_a_new_field_is_not_taken_from_a_checkpoint_unless_declared():
    """An allow-list: every field that is used says so, and none of these may."""
    for kind in (RunConfig, *(options() for options in OPTIONS.values())):
        rules = {name: field.metadata["option"].from_checkpoint for name, field in kind.__dataclass_fields__.items()}
        assert not [name for name in EVIL if rules.get(name) is True]
        assert not [
            name for name, rule in rules.items() if rule is True and name.endswith(("_dir", "_code", "_to", "_from"))
        ]


@pytest.mark.parametrize(
    "url", ["reference://x.jsonl::file:///evil.json", "local:///x.jsonl", "zip://x.jsonl::http://h/x"]
)
def test_stores_that_may_run_code_are_not_read_for_a_checkpoint(run, capsys, url):
    checkpoint = run / "checkpoints" / "step_00000003"
    claim(checkpoint, validation_file=[url])
    assert parsed("--checkpoint", checkpoint)[0].validation_file == []
    assert f"--validation_file {url}" in capsys.readouterr().err


def test_a_list_holds_no_flags(run, tmp_path):
    checkpoint = run / "checkpoints" / "step_00000003"
    claim(checkpoint, validation_file=["x.jsonl", "--trust_remote_code=true", "--output_dir=/evil"])
    with pytest.raises(UsageError, match=r"validation_file.*--trust_remote_code=true"):
        parsed("--checkpoint", checkpoint)
    file = kit.write_yaml(tmp_path / "run.yaml", {"train_file": ["x.jsonl", "--output_dir=/evil"]})
    with pytest.raises(UsageError, match=r"run.yaml: train_file.*--output_dir=/evil"):
        parsing.parse(["--config", str(file)], OPTIONS)


def test_files_of_folders_above_are_not_read(run, trained):
    for folder in (run.parent, run, run / "checkpoints"):
        kit.write_yaml(folder / "config.yaml", EVIL | {"seed": 666, "validation_file": ["/evil.jsonl"]})
    for name in ("checkpoints/step_00000003", "final"):
        found = parsed("--checkpoint", run / name)[0]
        assert (found.seed, found.trust_remote_code) == (42, False)
        assert found.validation_file == parsed("--checkpoint", trained.folder)[0].validation_file


@pytest.mark.parametrize(
    "typed, where",
    [
        ("run", "run"),
        ("run/final", "run"),
        ("run/checkpoints/step_00000003", "run"),
        ("run/checkpoints/../final/", "run"),
        ("model", "model"),
        ("good", "good"),
        ("link", "link"),
    ],
)
def test_where_eval_json_goes_follows_from_the_typed_path(run, tmp_path, monkeypatch, typed, where):
    shutil.copytree(run / "final", tmp_path / "model")
    shutil.copytree(run / "checkpoints" / "step_00000003", tmp_path / "good")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for name in (typed, tmp_path / typed):
        assert parsed("--checkpoint", name)[0].output_dir == str(tmp_path / where)


def test_final_model_is_evaluated_wherever_it_lies(trained, run, tmp_path):
    moved = Path(shutil.move(run / "final", tmp_path / "published"))
    (moved / "eval.json").symlink_to(tmp_path / "outside")
    codes, texts = kit.run_command("eval.py", "--checkpoint", moved, folder=tmp_path)
    assert codes == [0], texts
    assert json.loads((moved / "eval.json").read_text()) == trained.kind("eval")[-1]
    assert not (tmp_path / "outside").exists()  # a link is replaced, not followed
    assert atomic_folder.verify(moved) == []


def test_final_model_without_its_configuration_is_refused(run):
    shutil.rmtree(run / "checkpoints")
    (run / "final" / "run_config.yaml").unlink()
    (run / "final" / atomic_folder.MANIFEST).unlink()
    with pytest.raises(UsageError, match=r"run_config.yaml.*--model_name_or_path"):
        parsed("--checkpoint", run / "final")
    assert parsed("--checkpoint", run)[2] is None  # the run has it


def test_checkpoint_and_a_model_are_refused(run):
    with pytest.raises(UsageError, match="checkpoint and model_name_or_path"):
        parsed("--checkpoint", run, "--model_name_or_path", "gpt2")


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_only_shipped_metrics_run_without_opt_in(run, tmp_path, marker, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("f1", "accuracy"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.py").write_text(code(marker))
    names = [str(tmp_path / "f1"), str(tmp_path / "f1" / "f1.py"), "./f1", "accuracy", "../metrics/f1", "f1.py", ""]
    for name in names:
        with pytest.raises(UsageError, match=r"metrics.*trust_remote_code"):
            load_metric(name, False)
    assert load_metric("f1", False).compute(predictions=[0, 1], references=[0, 1]) == {"f1": 1.0}
    with pytest.raises(UsageError, match=r"metrics: accuracy.*\./accuracy"):  # the Hub's is meant, or this one?
        load_metric("accuracy", True)
    checkpoint = run / "checkpoints" / "step_00000003"
    claim(checkpoint, task="text_classification", metrics=names)
    assert parsed("--checkpoint", checkpoint)[1].metrics == ["f1"]
    assert parsed("--checkpoint", checkpoint, "--trust_remote_code", "true")[1].metrics == ["f1"]


def test_metric_script_runs_with_opt_in(tmp_path):
    shutil.copy(kit.REPOSITORY / "src" / "metrics" / "f1.py", tmp_path / "mine.py")
    metric = load_metric(str(tmp_path / "mine.py"), True)
    assert metric.compute(predictions=[0, 1], references=[0, 1]) == {"f1": 1.0}


# ---- models and data -------------------------------------------------------------------------------------------------


def change(file: Path, **fields) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | fields))


class Pickled:
    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return exec, (self.text,)


def spoil(kind: str, folder: Path, marker: Path) -> None:
    (folder / "evil.py").write_text(
        code(marker) + "from transformers import GPT2Config as C, GPT2LMHeadModel as M, GPT2Tokenizer as T"
    )
    known = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    if kind == "known model":
        change(folder / "config.json", auto_map=known)
    elif kind == "unknown model":
        change(folder / "config.json", auto_map=known, model_type="evil")
    elif kind == "tokenizer":
        change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}, tokenizer_class="T")
    elif kind == "generate":
        (folder / "custom_generate").mkdir()
        shutil.move(folder / "evil.py", folder / "custom_generate" / "generate.py")
    elif kind == "pickle":
        (folder / "model.safetensors").unlink()
        torch.save({"weight": Pickled(code(marker))}, folder / "pytorch_model.bin")
    else:
        change(folder / "config.json", **{kind: "evil/kernel"})


@pytest.mark.parametrize(
    "kind, refused",
    [
        ("known model", None),  # transformers' own class is used
        ("unknown model", "custom code"),
        ("tokenizer", "tokenizer"),
        ("generate", None),
        ("pickle", "could not be built"),
        ("attn_implementation", "attn_implementation.*trust_remote_code"),
        ("_attn_implementation", "attn_implementation.*trust_remote_code"),
    ],
)
def test_model_folder_runs_no_code(trained, tmp_path, marker, kind, refused):
    folder = Path(shutil.copytree(trained.folder / "final", tmp_path / "model"))
    spoil(kind, folder, marker)
    fields = {"model_name_or_path": folder, "train_file": "x.jsonl"}

    def build(**more):
        task = make_task(*parsing.parse(kit.flags(**fields | more), OPTIONS))
        task.load()
        task.build().generate(input_ids=torch.ones(1, 2, dtype=torch.long), max_new_tokens=2)

    if refused:
        with pytest.raises(UsageError, match=refused):
            build()
    else:
        build()
    if "attn" in kind:
        build(attn_implementation="sdpa")


def test_kernels_of_the_hub_need_opt_in(tmp_path):
    given = kit.flags(model_config="x.yaml", train_file="x.jsonl", attn_implementation="evil/kernel")
    with pytest.raises(UsageError, match=r"attn_implementation.*trust_remote_code"):
        validation.check(*parsing.parse(given, OPTIONS))
    validation.check(*parsing.parse([*given, "--trust_remote_code", "true"], OPTIONS))
    model = kit.write_yaml(tmp_path / "model.yaml", kit.TINY | {"attn_implementation": "evil/kernel"})
    with pytest.raises(UsageError, match=r"attn_implementation.*trust_remote_code"):
        make_task(*parsing.parse(kit.flags(model_config=model, train_file="x.jsonl"), OPTIONS)).load()


TEMPLATE = "{{{{ cycler.__init__.__globals__.os.system('touch {}') }}}}"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("kind", ["script", "outside", "local", "reference", "python yaml"])
def test_dataset_folder_runs_no_code(tmp_path, marker, kind, split, streaming):
    rows = [{"input_ids": [1, 2, 3]}] * 20
    folder = tmp_path / "data"
    folder.mkdir()
    kit.write_jsonl(folder / "train.jsonl", rows)
    kit.write_jsonl(tmp_path / "outside.jsonl", rows)
    reference = tmp_path / "reference.jsonl"
    reference.write_text(
        json.dumps({"version": 1, "templates": {"u": TEMPLATE.format(marker)}, "refs": {"x.jsonl": ["{{u}}", 0, 1]}})
    )
    named = {
        "outside": "../outside.jsonl",
        "local": f"local://{tmp_path}/outside.jsonl",
        "reference": f"reference://x.jsonl::file://{reference}",
        "python yaml": "train.jsonl",
    }
    if kind == "script":
        (folder / "data.py").write_text(code(marker))
    else:
        evil = f"\nevil: !!python/object/apply:os.system ['touch {marker}']" if kind == "python yaml" else ""
        paths = {"train": "train.jsonl"} | {split: named[kind]}
        files = "".join(f"  - split: {name}\n    path: '{path}'\n" for name, path in paths.items())
        text = f"---{evil}\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n"
        (folder / "README.md").write_text(text)
    model = kit.write_yaml(tmp_path / "model.yaml", kit.TINY)
    more = {"streaming": True, "max_steps": 1} if streaming else {}
    with pytest.raises(UsageError, match="dataset_name") as raised:
        kit.open_data(model_config=model, dataset_name=folder, cache_dir=tmp_path / "cache", **more)
    assert kind != "reference" or "reference://" in str(raised.value)


def test_chat_template_runs_no_code(tmp_path, marker):
    template = TEMPLATE.format(marker)
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", ["a b"], chat_template=template)
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 20
    file = kit.write_jsonl(tmp_path / "chat.jsonl", rows)
    model = kit.write_yaml(tmp_path / "model.yaml", kit.LLAMA)
    with pytest.raises(UsageError, match="template"):
        kit.open_data(model_config=model, tokenizer_name=tokenizer, train_file=file, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "logs/rank_0.log"])
def test_link_in_a_run_folder_is_not_written_through(tmp_path, name):
    """A run that can be resumed, so that nothing else refuses it."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    fields = kit.tiny_files(tmp_path) | {"dtype": "float64", "lr_scheduler_type": "constant", "output_dir": run}
    codes, texts = kit.run_command("train.py", *kit.flags(**fields, max_steps=2), folder=tmp_path)
    assert codes == [0], texts
    shutil.move(run / name, outside)
    (run / name).symlink_to(outside)
    before = outside.read_bytes()
    codes, texts = kit.run_command("train.py", *kit.flags(**fields, max_steps=3), folder=tmp_path)
    assert outside.read_bytes() == before
    assert codes == [2], texts
    assert f"{name} is a symbolic link" in texts[0]


# ---- what is published -----------------------------------------------------------------------------------------------


def test_final_model_says_what_it_is_and_loads(trained):
    from transformers import AutoModelForCausalLM

    card = (trained.folder / "final" / "README.md").read_text()
    assert "library_name: transformers\n" in card
    assert "train.jsonl" in card
    assert str(trained.folder.parent) not in card
    AutoModelForCausalLM.from_pretrained(trained.folder / "final")
    modes = {path.stat().st_mode & 0o777 for path in trained.folder.rglob("*") if path.is_file()}
    umask = os.umask(0)
    os.umask(umask)
    assert modes == {0o666 & ~umask}


def test_card_of_another_library(tmp_path):
    from src.checkpointing.model_folder import write_card

    run, _ = parsing.parse(kit.flags(train_file="https://u:p@host/x.jsonl?sig=abc", output_dir=tmp_path), OPTIONS)
    write_card(tmp_path, run, torch.nn.Linear(1, 1), {"train_file": run.train_file})
    card = (tmp_path / "README.md").read_text()
    assert "library_name" not in card
    assert " x.jsonl;" in card
    assert "abc" not in card + (tmp_path / "run_config.yaml").read_text()
