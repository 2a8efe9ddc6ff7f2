import json

import pytest
import torch

from tests.helpers import kit, technique_runs

EVERY = {"values": ["grad_norm", "weight_norm", "update_ratio"]}
LAYERS = {"transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.ln_f"}


def fields(folder, **options) -> dict:
    """Return fields of a run with a train line after steps 2, 4 and 5."""
    techniques = json.dumps({"gradient_statistics": EVERY | options})
    return technique_runs.files(folder) | {"logging_steps": 2, "adam_epsilon": 1e-4, "techniques": techniques}


def plain_lines(values: dict, **options) -> list[dict[str, float]]:
    """Return the statistics of each layer at each step of a plain loop, by name."""
    plain = technique_runs.Plain(values)
    optimizer, lines = plain.optimizer(eps=1e-4, **options), []

    def total(tensors: dict, layer: str) -> float:
        return torch.cat([t.flatten() for name, t in tensors.items() if name.startswith(layer)]).norm().item()

    def update(step: int) -> None:
        optimizer.zero_grad()
        plain.loss().backward()
        named = dict(plain.model.named_parameters())
        before = {name: p.detach().clone() for name, p in named.items()}
        optimizer.step()
        change = {name: p.detach() - before[name] for name, p in named.items()}
        lines.append({})
        for layer in LAYERS:
            lines[-1][f"grad_norm/{layer}"] = total({name: p.grad for name, p in named.items()}, layer)
            lines[-1][f"weight_norm/{layer}"] = total(before, layer)
            lines[-1][f"update_ratio/{layer}"] = total(change, layer) / total(before, layer)

    plain.train(update)
    return lines


@pytest.mark.parametrize("world, micro, env, bar", [(1, 16, None, 1e-9), (2, 4, None, 1e-9), (2, 4, "fsdp2", 1e-3)])
def test_statistics_of_each_layer_are_those_of_a_plain_loop(tmp_path, world, micro, env, bar):
    values = fields(tmp_path) | ({"dtype": "float32"} if env else {})
    expected = plain_lines(values)
    more = {"env": kit.where("fsdp2", 2, mixed_precision="no"), "units": 1} if env else {}
    run = technique_runs.train(tmp_path / "run", values, world, micro, **more)
    lines = run.kind("train")
    assert [line["step"] for line in lines] == [2, 4, 5]
    for line in lines:
        found = {name: value for name, value in line.items() if "/" in name}
        assert found == pytest.approx(expected[line["step"] - 1], rel=bar)
