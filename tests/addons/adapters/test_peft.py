"""Adapters: exact however a step is split, resumed and evaluated bitwise, merged in final/, checked before the first step."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import save_file

from addons.adapters import peft as addon
from addons.adapters.peft import base_model, merging, options, weight_hashes
from addons.adapters.peft.base_model import BaseModel
from engine.checkpointing import model_folder
from engine.checkpointing.locate_weights import init_weights
from engine.config.errors import UsageError
from engine.config.find_addons import run_config
from engine.run.model_with_loss import ModelWithLoss
from tests.helpers import kit, plain_task, technique_runs
from tests.helpers.technique_runs import Plain

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.cluster  # needs an extra package

LORA = {"type": "lora", "r": 4, "target": ["c_attn", "c_fc"], "lora_alpha": 16}
IDS = torch.tensor([[1, 2, 3, 4, 5]])


def fields(folder, **options) -> dict:
    return technique_runs.files(folder) | {"peft": json.dumps(LORA | options)}


def train_plain(values: dict, frozen: bool = True) -> Plain:
    """Return the plain loop after training with peft's own wrapper; unless `frozen`, the base model is trained, too."""
    plain = Plain({name: value for name, value in values.items() if name != "peft"})
    options = {"target_modules" if name == "target" else name: value for name, value in LORA.items() if name != "type"}
    torch.manual_seed(42)
    plain.model = peft.get_peft_model(plain.model, peft.LoraConfig(**options, fan_in_fan_out=True))
    if not frozen:
        plain.model.requires_grad_(True)
    plain.descend(plain.optimizer())
    return plain


def test_lora_is_exact_for_every_split(tmp_path):
    values = fields(tmp_path)
    with_dropout = values | {"peft": json.dumps(LORA | {"lora_dropout": 0.2})}
    plain = train_plain(values)
    adapter = {name: value.clone() for name, value in peft.get_peft_model_state_dict(plain.model).items()}
    merged = plain.model.merge_and_unload().state_dict()
    first = technique_runs.check_splits(tmp_path, values, merged, dropout=with_dropout)
    saved = kit.load_weights(first.folder / "final" / "adapter", "adapter_model")
    assert kit.distance(saved, adapter) <= 1e-10
    mutant = train_plain(values, frozen=False).model.merge_and_unload().state_dict()
    assert kit.distance(first.weights, {name: mutant[name] for name in first.weights}) > 1e-4


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> kit.Run:
    """A run with dropout in model and adapter on two processes, which also resumes bitwise."""
    folder = tmp_path_factory.mktemp("lora")
    values = fields(folder, lora_dropout=0.2) | {"eval_steps": 2, "metric_for_best_model": "loss"}
    values = technique_runs.with_dropout(folder, values) | {"techniques": json.dumps({"ema": {"decay": 0.5}})}
    return technique_runs.check_resume(folder, values)


def test_run_checkpoint_and_final_evaluate_bitwise(run, tmp_path):
    lines = {line["step"]: line for line in run.kind("eval")}
    for name in ("", "final", "checkpoints/step_00000002"):
        found = kit.run_evaluation(1, tmp_path / f"eval{name[-3:]}", "--checkpoint", run.folder / name)
        expected = {key: value for key, value in lines[found["step"]].items() if not key.startswith("ema/")}
        assert found == expected, name


def test_averages_and_optimizer_hold_the_adapter_only(run):
    checkpoint = run.folder / "checkpoints" / "step_00000002"
    own = kit.load_weights(checkpoint, "adapter")
    assert all(".lora_" in name for name in own)
    average = {name.removeprefix("average/model.") for name in kit.load_weights(checkpoint, "ema")} - {"updates"}
    assert average == own.keys()
    moments = {name.split("/", 1)[1].removeprefix("model.") for name in kit.load_weights(checkpoint, "optimizer")}
    assert moments == own.keys()


def test_base_model_of_a_checkpoint_is_not_taken_for_the_trained_model(run, tmp_path):
    """Without `peft`, final/ is merged, and a checkpoint is refused, also with its base model beside the adapter; another
    adapter than the saved one is refused."""
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    start = {name: config[name] for name in ("model_config", "train_file", "dtype")}
    checkpoint = str(run.folder / "checkpoints" / "step_00000002")
    task, _ = kit.open_data(**start, output_dir=tmp_path)
    task.build_model(str(run.folder / "final"))
    both = shutil.copytree(checkpoint, tmp_path / "both")
    shutil.copy2(run.folder / "final" / "model.safetensors", both)
    for folder in (checkpoint, both):
        with pytest.raises(UsageError, match="only what an add-on has trained"):
            task.build_model(str(folder))
    task, _ = kit.open_data(**start, output_dir=tmp_path, peft=json.dumps(LORA | {"r": 2}))
    with pytest.raises(UsageError, match="r 4, but this field says 2"):
        task.build_model(checkpoint)


# ---- a merged model and its old adapter --------------------------------------------------------------------------------


def start_on(run, tmp_path, **fields) -> dict:
    values = technique_runs.files(tmp_path) | {"peft": json.dumps(LORA)} | fields
    return {name: value for name, value in values.items() if name != "model_config"}


def content(folder) -> str:
    return weight_hashes.hash_of_weights(run_config(), folder)


def printed(folder) -> str:
    return (folder.with_suffix(".out") / "rank0.txt").read_text()


def merged_and_adapted(base, adapter) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()(IDS).logits


@pytest.mark.parametrize("rank", [2, 4])
def test_a_named_merged_model_gets_a_new_adapter(run, tmp_path, rank):
    """Of the same options, or of others; its checkpoint names the merged weights as they are, and it fits them."""
    from transformers import AutoModelForCausalLM

    named = run.folder / "final"
    values = start_on(run, tmp_path, model_name_or_path=named, peft=json.dumps(LORA | {"r": rank}))
    new = technique_runs.check_resume(tmp_path, values)
    base = base_model.read_base(new.folder / "checkpoints/step_00000002")
    assert base == BaseModel(str(named), weights=content(named))
    assert f"a new one, on {named}" in printed(new.folder)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(new.folder / "final").eval()(IDS).logits
    fits = merged_and_adapted(named, new.folder / "final/adapter")
    assert torch.allclose(fits, logits, rtol=0, atol=1e-10)


def test_mutant_the_old_adapter_under_a_named_model_is_seen(run, tmp_path, monkeypatch):
    named = run.folder / "final"
    add = addon.add_adapter
    old = lambda task, whole, weights, empty=False: add(task, whole, weights or named, empty)  # noqa: E731
    monkeypatch.setattr(addon, "add_adapter", old)
    values = start_on(run, tmp_path, model_name_or_path=named)
    wrong = technique_runs.train(tmp_path / "wrong", values)
    monkeypatch.undo()
    new = technique_runs.train(tmp_path / "new", values)
    assert abs(wrong.losses()[0] - new.losses()[0]) > 1e-4
    assert f"a new one, on {named}" not in printed(wrong.folder)


def test_init_from_trains_the_old_adapter_further(run, tmp_path):
    """From a checkpoint and from final/, whose merged weights it does not use; the plan, also a dry run's, says so."""
    base = base_model.read_base(run.folder / "checkpoints/step_00000002")
    assert base.seed == 42
    for name in ("final", "checkpoints/step_00000002"):
        values = start_on(run, tmp_path, init_from=run.folder / name, model_name_or_path=run.folder / "final")
        new = technique_runs.train(tmp_path / name.replace("/", "_"), values)
        assert base_model.read_base(new.folder / "checkpoints/step_00000002") == base
        assert f"that of {run.folder / name}, trained further" in printed(new.folder)
    argv = [*kit.flags(**values), "--dry_run", "true"]
    codes, outputs = kit.run_command("train.py", *argv, folder=tmp_path / "dry")
    assert codes == [0]
    assert f"that of {run.folder / name}, trained further" in outputs[0]


def test_an_adapter_without_its_model_is_refused(run, tmp_path):
    """As a named model: a checkpoint, which has no base model, and a folder with an adapter only."""
    adapter = run.folder / "final" / "adapter"
    alone = shutil.copytree(adapter, tmp_path / "alone")
    config = json.loads((alone / "adapter_config.json").read_text())
    (alone / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "some/base"}))
    for named, words in (
        (run.folder / "checkpoints/step_00000002", "give the run's final/"),
        (adapter, f"holds only an adapter of the package peft: give {run.folder / 'final'}"),
        (alone, "holds only an adapter of the package peft: give its base model some/base"),
    ):
        with pytest.raises(UsageError, match=words):
            task, _ = kit.open_data(**start_on(run, tmp_path, model_name_or_path=named, output_dir=tmp_path / "out"))
            task.build_model()
    for folder in (adapter, alone):
        with pytest.raises(UsageError, match=r"^init_from: .* holds only an adapter"):
            init_weights(run_config(init_from=str(folder)))


def test_an_adapter_beside_the_weights_of_init_from_is_refused(run, tmp_path):
    """transformers would add it without a word."""
    folder = shutil.copytree(run.folder / "final", tmp_path / "both")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy2(folder / "adapter" / name, folder / name)
    values = start_on(run, tmp_path, model_name_or_path=run.folder / "final", output_dir=tmp_path / "out")
    task, _ = kit.open_data(**values)
    with pytest.raises(UsageError, match="holds an adapter of the package peft beside a model"):
        task.build_model(str(folder))


def test_teacher_from_a_checkpoint_is_not_its_base_model(run, tmp_path):
    """Also if the student has an adapter: the teacher has none."""
    kit.need_task("distillation")
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    fields = {name: config[name] for name in ("model_config", "train_file", "dtype")} | {"peft": json.dumps(LORA)}
    fields |= {"task": "distillation", "output_dir": tmp_path}
    task, _ = kit.open_data(**fields, teacher_name_or_path=run.folder / "checkpoints" / "step_00000002")
    with pytest.raises(UsageError, match="only what an add-on has trained"):
        task.build_model()
    task, _ = kit.open_data(**fields, teacher_name_or_path=run.folder)
    assert not any("lora_" in name for name in task.build_model().teacher.state_dict())


def test_plain_module_with_an_adapter(tmp_path):
    """DDP on two processes; the merged weights load into the module without peft."""
    with plain_task.registered():
        data = plain_task.write_data(tmp_path)
        options = {"type": "loha", "r": 2, "rank_dropout": 0.1, "modules_to_save": ["leave"]}
        argv = plain_task.flags(data, peft=json.dumps(options), max_steps=12)
        one, two = (kit.run_training(world, tmp_path / f"run{world}", *argv) for world in (1, 2))
        assert kit.distance(one.weights, two.weights) <= 1e-10
        line = kit.run_evaluation(2, tmp_path / "eval", "--checkpoint", two.folder)
        assert line == two.kind("eval")[-1]
        net = plain_task.Net()
        net.double().load_state_dict(two.weights)
        saved = kit.load_weights(two.folder / "final" / "adapter", "adapter_model")
        assert any("leave" in name for name in saved)


# ---- in this process -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("llama")
    return {
        "model_config": kit.write_yaml(folder / "llama.yaml", kit.LLAMA | {"num_hidden_layers": 1}),
        "train_file": kit.write_jsonl(folder / "train.jsonl", [{"input_ids": [1, 2, 3, 4]}] * 4),
        "output_dir": folder / "run",
        "dtype": "float64",
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "init_lora_weights": "orthogonal"},
        {"modules_to_save": ["lm_head"]},
        {"target": ["lm_head"]},
        {"bias": "lora_only"},
        {"type": "ia3"},
        {"type": "ia3", "target": None},
        {"type": "ia3", "target": "all-linear"},
        {"type": "trainable_tokens", "token_indices": [2, 3], "target": None},
        {"type": "lokr", "r": 2},
        {"type": "oft"},
        {"type": "hra"},
        {"type": "fourierft", "n_frequency": 10},
    ],
    ids=str,
)
def test_every_type_is_saved_loaded_and_merged(llama, tmp_path, monkeypatch, options):
    task, splits = kit.open_data(**llama, peft=json.dumps({"target": ["q_proj", "o_proj"]} | options))
    inputs = task.collate(splits["train"].rows(range(4)), training=True).inputs
    model = task.build_model().train()
    assert kit.same(model.state_dict(), task.build_model().state_dict())  # from the seed alone
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    with torch.no_grad():
        first = model.eval()(input_ids=IDS).logits
    for _ in range(3):
        task.loss(model.train(), inputs)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    check_files(task, model.eval(), first, tmp_path, monkeypatch)


@torch.no_grad()
def check_files(task, model, first: torch.Tensor, folder, monkeypatch) -> None:
    """Assert that a checkpoint and final/ give the same logits bitwise, and the merged weights up to rounding."""
    from transformers import AutoModelForCausalLM

    logits = model(input_ids=IDS).logits
    assert not torch.allclose(logits, first, rtol=0, atol=1e-8)
    state = model.state_dict(keep_vars=True)
    left_out = task.left_out(model, state)
    trained = {name: value for name, value in state.items() if name not in left_out}
    model_folder.write_model(ModelWithLoss(model, task), folder, trained)
    assert not [*folder.glob("model*")]
    assert torch.equal(task.build_model(str(folder)).eval()(input_ids=IDS).logits, logits)
    start = folder / "start"
    task.build().save_pretrained(start)
    monkeypatch.setattr(merging, "MERGED_AT_ONCE", 1)  # in several files
    assert task.cfg.addons[0].finish(task, folder)
    assert len([*folder.glob("model-*-of-*.safetensors")]) > 1
    assert torch.equal(task.build_model(str(folder)).eval()(input_ids=IDS).logits, logits)
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits
    assert torch.allclose(merged, logits, rtol=0, atol=1e-10)
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()(input_ids=IDS).logits
    assert torch.allclose(adapted, logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"type": "lora"}, ["q_proj", "v_proj"]),
        ({"type": "ia3"}, ["k_proj", "v_proj", "down_proj"]),
        ({"type": "trainable_tokens", "token_indices": [2]}, ["embed_tokens"]),
    ],
    ids=str,
)
def test_without_target_the_layers_are_those_of_peft(llama, options, layers):
    task, _ = kit.open_data(**llama, peft=json.dumps(options))
    adapted = {name for name, module in task.build_model().named_modules() if hasattr(module, "base_layer")}
    assert {name.rpartition(".")[2] for name in adapted} == {*layers}


def test_ranks_without_weights_judge_as_the_one_with_weights(llama, tmp_path):
    """An adapter that cannot be merged, resumed with merge: else some ranks would end and the others wait."""
    beft = json.dumps({"type": "beft", "target": ["q_proj"]})
    task, _ = kit.open_data(**llama, peft=beft, merge=False)
    model = task.build_model()
    model_folder.write_model(ModelWithLoss(model, task), tmp_path, dict(model.state_dict()))
    task, _ = kit.open_data(**llama, peft=beft)
    for empty in (False, True):
        task.build_model(str(tmp_path), empty=empty)
        with pytest.raises(UsageError, match="could not be merged"):
            task.build_model(empty=empty)


@pytest.mark.parametrize("target", [["lm_head"], ["q_proj"]], ids=str)
def test_loss_uses_an_adapter_of_the_head(llama, target):
    """The chunked cross-entropy reads the weight of a plain head, which would leave its adapter without a gradient."""
    task, _ = kit.open_data(**llama, peft=json.dumps({"type": "lora", "target": target}))
    task.build_model()
    assert task.plain_head is (target == ["q_proj"])


@pytest.mark.parametrize("name", ["lora_alpha", "lora_target_modules", "use_dora"])
def test_options_of_adapters_in_other_trainers_lead_to_peft(llama, name):
    with pytest.raises(UsageError, match=f"{name}: unknown field; give peft: "):
        kit.open_data(**llama, **{name: 16})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"type": "lorra"}, ["lorra", "lora"]),
        *(({"type": name}, [f"type is {name}", "choose from"]) for name in ("prompt_tuning", "adalora", "vera")),
        ({"rank": 8}, ["unexpected", "rank"]),
        ({"lora_alfa": 4}, ["unexpected", "lora_alfa", "did you mean lora_alpha?"]),
        ({"target": "q_proj", "target_modules": ["v_proj"]}, ["target_modules", "both", "remove one"]),
        ({"inference_mode": True}, ["inference_mode", "nothing would be trained"]),
        ({"alora_invocation_tokens": [1]}, ["alora_invocation_tokens", "nothing would be trained"]),
        ({"layer_replication": [[0, 1], [0, 1]]}, ["layer_replication", "could not be saved"]),
        ({"r": "four"}, ["r is 'four'", "whole number"]),
        ({"r": True}, ["r is True", "whole number"]),
        ({"use_rslora": 1}, ["use_rslora is 1", "true or false"]),
        ({"lora_dropout": "0,1"}, ["lora_dropout is '0,1'", "give a number"]),
        ({"lora_dropout": -0.1}, ["lora_dropout is -0.1", "from 0 to less than 1"]),
        ({"type": "loha", "rank_dropout": 1}, ["rank_dropout is 1", "from 0 to less than 1"]),
        ({"type": "trainable_tokens"}, ["trainable_tokens", "token_indices: [5, 6]"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights", "pissa"]),
        ({"megatron_core": "os"}, ["megatron_core"]),
        ({"type": "loha", "module_dropout": 0.1}, ["module_dropout", "rank_dropout"]),
        ({}, ["whole model", "{type: lora}"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_options_are_errors_before_the_data_is_read(llama, options, words):
    with pytest.raises(UsageError) as error:
        kit.open_data(**llama, peft=json.dumps(options))
    assert all(word in str(error.value) for word in ["peft", *words]), error.value


def test_numbers_that_peft_takes_are_taken():
    """Also a factor with a fraction, a whole number for a fraction, and false for what is refused."""
    given = {"lora_alpha": 1.5, "lora_dropout": 0, "r": 2, "inference_mode": False, "target": "q_proj"}
    config = options.read_options(given)[1]
    assert (config.lora_alpha, config.r, config.target_modules) == (1.5, 2, "q_proj")


def test_types_without_a_merge_are_refused_at_the_start(llama):
    """Unless they are not merged: lily never is, a bias only into a layer that has one."""
    types = ({"type": "lily"}, {"type": "beft"}, {"type": "lora", "lora_bias": True})
    lily, beft, lora = ({**llama, "peft": json.dumps(each | {"target": ["q_proj"]})} for each in types)
    with pytest.raises(UsageError, match=r"type lily cannot be merged .*: give merge: false, or another type"):
        kit.open_data(**lily)
    for values in (beft, lora):
        task, _ = kit.open_data(**values)
        with pytest.raises(UsageError, match=r"q_proj could not be merged, because it has no bias.*merge: false"):
            task.build_model()
    for values in (lily, beft, lora):
        task, _ = kit.open_data(**values, merge=False)
        assert task.build_model().base_names


def test_layers_without_a_merge_are_refused():
    """A convolution with groups; one without is taken."""
    for groups in (1, 2):
        model = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3, groups=groups))
        tuner, config = options.read_options({"type": "lora", "r": 2, "target": ["0"]})
        tuner(model, config, adapter_name="default")
        if groups == 1:
            merging.check_can_merge(model)
            continue
        with pytest.raises(UsageError, match="0 could not be merged, because it is a convolution with 2 groups"):
            merging.check_can_merge(model)


@pytest.mark.parametrize("target", [["qproj"], ["q_proj", "qproj"], "qproj", ["embed_tokens"]], ids=str)
def test_wrong_targets_are_errors(llama, tmp_path, target):
    """A module that does not exist; a weight that embedding and head share."""
    tied = kit.write_yaml(tmp_path / "tied.yaml", kit.LLAMA | {"tie_word_embeddings": True})
    task, _ = kit.open_data(**llama | {"model_config": tied}, peft=json.dumps({"type": "lora", "target": target}))
    words = r"^peft: target_modules: qproj is no part .*did you mean.*q_proj.*choose from"
    words = words if "qproj" in target else "^peft: .*lm_head"
    with pytest.raises(UsageError, match=words):
        task.build_model()


@pytest.mark.parametrize("layers", [2, [0, 2], [-1]])
def test_layers_by_number_must_be_there(llama, layers):
    """peft would leave out those that the model does not have."""
    adapter = {"type": "lora", "target": ["q_proj"], "layers_to_transform": layers}
    task, _ = kit.open_data(**llama, peft=json.dumps(adapter))
    with pytest.raises(UsageError, match=r"^peft: layers_to_transform: .* has no layer (2|-1): its layers are 0 to 0$"):
        task.build_model()
    task, _ = kit.open_data(**llama, peft=json.dumps(adapter | {"layers_to_transform": 0}))
    trained = {name for name, value in task.build_model().named_parameters() if value.requires_grad}
    assert trained
    assert all(".layers.0." in name for name in trained)


def test_a_name_in_place_of_a_list_is_an_error(llama):
    """For peft, it is a pattern, which matches no whole name."""
    task, _ = kit.open_data(**llama, peft=json.dumps({"target": "q_proj"}))
    with pytest.raises(UsageError, match=r"^peft: target_modules: q_proj is a pattern .*\[q_proj\]"):
        task.build_model()


def trained_parameters(folder, rows: list[dict], target: str | None, **fields) -> set[str]:
    """Return the names of the parameters of a tiny BERT that are trained."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    task, _ = kit.open_data(
        model_config=kit.write_yaml(folder / "bert.yaml", {"model_type": "bert"} | small),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer", ["a b c"]),
        train_file=kit.write_jsonl(folder / "train.jsonl", rows),
        output_dir=folder / "run",
        peft=json.dumps({"type": "lora", "target": target}),
        **fields,
    )
    return {name for name, parameter in task.build_model().named_parameters() if parameter.requires_grad}


def test_new_head_is_trained_in_full(tmp_path):
    """As peft does for classifiers; `all-linear` leaves it alone."""
    kit.need_task("text_classification")
    rows = [{"text": "a b", "label": 0}, {"text": "c", "label": 1}] * 4
    trained = trained_parameters(tmp_path, rows, "all-linear", task="text_classification")
    assert "classifier.modules_to_save.default.weight" in trained
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert not any("classifier" in name and "lora_" in name for name in trained)


def test_learned_temperature_is_trained(tmp_path):
    rows = [{"anchor": "a b", "positive": "c"}] * 4
    trained = trained_parameters(tmp_path, rows, None, task="embeddings", learn_temperature=True)
    assert "logit_scale" in trained
    assert all("lora_" in name for name in trained - {"logit_scale"})


def test_field_without_the_package_is_an_error(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft.mapping", None)
    with pytest.raises(UsageError, match=r"\.venv/bin/pip install peft==\d"):
        options.read_options({"type": "lora"})


@pytest.fixture
def own_head(tmp_path) -> dict:
    """A run that also trains the head of a model whose config.json says tied, but whose weights are not."""
    off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    named = kit.save_model(tmp_path / "named", kit.TINY | off)
    tensors = kit.load_weights(named)
    tensors["lm_head.weight"] = torch.randn_like(tensors["transformer.wte.weight"]) / 8
    save_file(tensors, named / "model.safetensors", {"format": "pt"})
    values = fields(tmp_path, modules_to_save=["lm_head"]) | {"model_name_or_path": named}
    return {name: value for name, value in values.items() if name != "model_config"}


def test_adapter_of_a_head_of_its_own_under_fsdp2(tmp_path, own_head):
    one = technique_runs.train(tmp_path / "one", own_head, 1, 4)
    env = kit.where("fsdp2", 2, mixed_precision="no")
    two = technique_runs.train(tmp_path / "two", own_head, 2, 4, env=env, units=1)
    assert kit.distance(two.weights, one.weights) <= 1e-10


def test_mutant_ranks_that_learn_of_the_head_after_the_injection(tmp_path, own_head, monkeypatch):
    """The error of one rank ends both."""
    argv, env = [*kit.flags(**own_head), "--output_dir", "run"], kit.where("fsdp2", 2, mixed_precision="no")
    from engine.distributed import fsdp2

    alike = fsdp2.make_alike
    later = lambda model, wanted: "base_names" in vars(model) and alike(model, wanted)  # noqa: E731
    monkeypatch.setattr(fsdp2, "make_alike", later)
    codes, outputs = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=2, env=env)
    assert codes == [2, 2], outputs
    assert "are one weight" in outputs[0].rstrip().splitlines()[-1]


def test_lora_under_fsdp2(tmp_path):
    """On two processes: weights of one process, resumed, one merged file, and the base model sharded as well."""
    values = fields(tmp_path)
    technique_runs.check_fsdp2(tmp_path, values)
    final = tmp_path / "fsdp2" / "straight" / "final"
    assert [path.name for path in final.glob("model*")] == ["model.safetensors"]
    found = kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", final)
    assert found["loss"] == pytest.approx(kit.Run(final.parent).kind("eval")[-1]["loss"], rel=1e-6)
