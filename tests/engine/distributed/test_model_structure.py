"""A model that rank 0 builds from weights, and the other ranks without: parameters, ties, buffers and settings alike."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from engine.config.errors import UsageError
from engine.distributed.model_structure import make_alike, structure_of
from engine.models.build_model import correct_tied_setting
from src.tasks import causal_lm
from tests.helpers import kit
from tests.helpers.backend_runs import check_same_numbers, where
from tests.helpers.backend_runs import fsdp2_recipe as recipe

IDS = torch.arange(40).view(2, 20)


class Small(torch.nn.Module):
    """An embedding and a head, tied or not, with buffers and settings as the weights say."""

    def __init__(self, tied: bool = True, trained: bool = True, steps: int = 3, saved: bool = True, scale: float = 1.0):
        super().__init__()
        self.config = SimpleNamespace(tied=tied, scale=scale)
        self.embedding, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.embedding.weight.requires_grad_(trained)
        self.register_buffer("statistics", torch.zeros(steps), persistent=saved)


@pytest.mark.parametrize(
    "main, other",
    [
        ({"tied": False}, {}),
        ({}, {"tied": False}),
        ({"trained": False}, {}),
        ({"steps": 4}, {}),
        ({"saved": False}, {}),
        ({"scale": 2.0}, {}),
    ],
)
def test_another_rank_gets_the_structure_of_the_main_process(main, other):
    wanted, model = structure_of(Small(**main)), Small(**other)
    assert structure_of(model) != wanted
    make_alike(model, wanted)
    assert structure_of(model) == wanted
    assert (model.head.weight is model.embedding.weight) == main.get("tied", True)


def test_a_buffer_of_one_rank_is_added_or_removed():
    with_buffer, without = Small(), Small()
    with_buffer.head.register_buffer("mark", torch.ones(2, dtype=torch.bool), persistent=False)
    wanted = structure_of(without)
    make_alike(without, structure_of(with_buffer))
    assert without.head.mark.dtype == torch.bool
    make_alike(without, wanted)
    assert not hasattr(without.head, "mark")


def test_another_module_is_named():
    larger = Small()
    larger.extra = torch.nn.Linear(2, 2)
    for model, other in ((Small(), larger), (larger, Small())):
        with pytest.raises(UsageError, match=r"build another Small than rank 0.*extra"):
            make_alike(model, structure_of(other))


# ---- a head of its own under a configuration that says tied (transformers#42612) ---------------------------------------


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A folder with a GPT-2 whose config.json says tied, and whose weights are not."""
    folder = kit.save_model(tmp_path_factory.mktemp("untied"), kit.EXACT | {"tie_word_embeddings": True})
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["transformer.wte.weight"]) / 8
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def flags(files, folder) -> list[str]:
    sizes = {"max_steps": 4, "eval_steps": 4, "save_steps": 2, "warmup_steps": 0, "max_eval_examples": 40}
    return recipe(files, model_config=None, model_name_or_path=folder, dtype="float64", **sizes)


@pytest.mark.cluster
def test_a_head_of_its_own_gives_the_numbers_of_one_process(files, untied, tmp_path):
    """Trained on one process and on two and three ranks, resumed, evaluated; saved as what it is."""
    argv = flags(files, untied)
    alone = kit.run_training(1, tmp_path / "alone", *argv)
    assert "lm_head.weight" in alone.weights
    for world in (2, 3):
        run = kit.run_training(world, tmp_path / f"on{world}", *argv, env=where("fsdp2", world))
        check_same_numbers(alone, run, 1e-12)
        assert kit.distance(alone.weights, run.weights) <= 1e-10
    half = kit.rewind(run.folder, 2, tmp_path / "half")
    assert kit.same(kit.run_training(3, half, *argv, env=where("fsdp2", 3)).weights, run.weights)
    final = run.folder / "final"
    line = kit.run_evaluation(2, tmp_path / "here", "--checkpoint", final, env=where("fsdp2", 2))
    assert line["loss"] == pytest.approx(alone.kind("eval")[-1]["loss"], rel=1e-12)
    for folder in (final, run.folder / "checkpoints/step_00000004", alone.folder / "final"):
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values())
        assert kit.same(dict(model.state_dict()), kit.load_weights(folder))
    model = AutoModelForCausalLM.from_pretrained(final).eval()
    expected = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float64).eval()
    expected.load_state_dict(run.weights)
    assert torch.equal(model(IDS).logits, expected(IDS).logits)


@pytest.mark.cluster
def test_mutant_ranks_that_tie_by_the_configuration_are_caught(files, untied, tmp_path, monkeypatch):
    argv, env = [*flags(files, untied), "--ddp_timeout", "10", "--output_dir", "run"], where("fsdp2", 2)
    monkeypatch.setattr("engine.distributed.fsdp2.make_alike", lambda model, structure: None)
    codes, _ = kit.run_command("train.py", *argv, folder=tmp_path, world=2, env=env)
    assert 0 not in codes


@pytest.mark.cluster
def test_another_model_on_a_rank_without_weights_is_refused(files, tmp_path, monkeypatch):
    build = causal_lm.Task.build

    def edited(self, weights=None, empty=False):
        model = build(self, weights, empty)
        if not empty:
            model.extra = torch.nn.Linear(2, 2)
        return model

    monkeypatch.setattr(causal_lm.Task, "build", edited)
    argv = [*recipe(files, max_steps=2), "--output_dir", "run"]
    codes, outputs = kit.run_command("train.py", *argv, folder=tmp_path, world=2, env=where("fsdp2", 2))
    assert codes == [2, 2], outputs
    assert "extra" in outputs[0].rstrip().splitlines()[-1]


def test_some_pairs_apart_keep_the_setting(tmp_path):
    """BERT ties matrix and bias of its head: false would mean both, but only the matrix is apart."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForMaskedLM(BertConfig(vocab_size=20, **sizes))
    decoder = model.cls.predictions.decoder
    decoder.weight = torch.nn.Parameter(decoder.weight.detach().clone())
    correct_tied_setting(model)
    assert model.config.tie_word_embeddings
    decoder.bias = torch.nn.Parameter(decoder.bias.detach().clone())
    correct_tied_setting(model)
    assert not model.config.tie_word_embeddings
