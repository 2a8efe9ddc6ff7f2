"""Parameter groups: patterns of names, rates that fall from layer to layer, frozen parameters."""

import json
import re
from pathlib import Path

import pytest
import torch

from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.run.model_with_loss import ModelWithLoss
from engine.run.run_size import describe_groups
from src.training.optimizers import layer_depths, make_optimizer
from tests.helpers import kit, technique_runs

DECAY = 0.5
GROUPS = {"*.ln_1.*": {"lr_factor": 0.1}, "*.mlp.*.weight": {"weight_decay": 0.3, "lr_factor": 2.0}}
GROUPS |= {"*.mlp.*": {"lr_factor": 0.2}}  # the first pattern that matches decides


def fields(folder) -> dict:
    return technique_runs.files(folder) | {
        "model_config": kit.write_yaml(Path(folder, "two_layers.yaml"), kit.EXACT),
        "lr_layer_decay": DECAY,
        "freeze": ["*.wpe.weight", "*.attn.c_proj.bias"],
        "parameter_groups": json.dumps(GROUPS),
    }


def plain_weights(values: dict, first: int = 1) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop with one group for each parameter; with `first` 0, layers are off by one."""
    plain = technique_runs.Plain(values)
    layers = plain.model.config.n_layer
    groups = []
    for name, parameter in plain.model.named_parameters():
        if "wpe" in name or name.endswith("attn.c_proj.bias"):
            continue
        words = name.split(".")
        depth = int(words[2]) + first if words[1] == "h" else layers + 1 if words[1] == "ln_f" else 0
        group = {"params": [parameter], "lr": 1e-2 * DECAY ** (layers + 1 - depth)}
        group["weight_decay"] = 0.1 if parameter.dim() >= 2 else 0.0
        if ".ln_1." in name:
            group["lr"] *= 0.1
        if ".mlp." in name and words[-1] == "weight":
            group |= {"lr": group["lr"] * 2, "weight_decay": 0.3}
        elif ".mlp." in name:
            group["lr"] *= 0.2
        groups.append(group)
    return plain.descend(torch.optim.AdamW(groups))


def test_groups_layer_decay_and_freeze_are_exact_for_every_split(tmp_path):
    values = fields(tmp_path)
    first = technique_runs.check_splits(tmp_path, values, plain_weights(values))
    mutant = plain_weights(values, first=0)
    assert kit.distance(first.weights, {name: mutant[name] for name in first.weights}) > 1e-4


# ---- depths ------------------------------------------------------------------------------------------------------------


class TwoLists(torch.nn.Module):
    """Parameters before, in, between and after two lists of layers; and a list inside a layer."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.encoder = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2)) for _ in range(2)
        )
        self.between = torch.nn.LayerNorm(2)
        self.decoder = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
        self.head = torch.nn.Linear(2, 2)


def test_plan_has_the_rates_of_groups(tmp_path):
    """A pattern's rate and decay; of the groups of many layers, the lowest and the highest rate."""
    task, _ = kit.open_data(**technique_runs.files(tmp_path))
    groups = {"*.mlp.*": {"lr_factor": 0.2, "weight_decay": 0.3}}
    for given, said in (
        ({"parameter_groups": groups}, r"rate 2\.00e-04, weight decay 0\.3"),
        (
            {"lr_layer_decay": 0.5, "parameter_groups": GROUPS},
            r"^\d+ with rates of \d",
        ),
    ):
        cfg = RunConfig(learning_rate=1e-3, weight_decay=0.1, **given)
        model = ModelWithLoss(task.build_model(), task)
        row = describe_groups(make_optimizer(cfg, model, fused=False).param_groups, 1e-3)
        assert re.search(said, row), row


def test_depths_count_layers_in_the_order_of_the_model():
    depths, layers = layer_depths(TwoLists())
    assert layers == 5
    expected = {"embed": 0, "encoder.0.1": 1, "encoder.1.0": 2, "between": 2, "decoder.0": 3, "decoder.2": 5, "head": 6}
    assert {name: depths[f"{name}.weight"] for name in expected} == expected


def test_frozen_parameters_are_in_no_group():
    model = TwoLists()
    groups = make_optimizer(RunConfig(freeze=["embed.*"]), model).param_groups
    assert not any(parameter is model.embed.weight for group in groups for parameter in group["params"])


# ---- patterns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["freeze", "parameter_groups"])
def test_a_pattern_that_matches_nothing_names_the_nearest_parameter(field):
    patterns = ["embed.weigth"] if field == "freeze" else {"embed.weigth": {"lr_factor": 2}}
    with pytest.raises(UsageError, match=rf"{field}: embed\.weigth matches no parameter; did you mean embed\.weight\?"):
        make_optimizer(RunConfig(**{field: patterns}), TwoLists())
