"""Parts of a checkpoint beside the model (an average of weights): given to `load`, saved, resumed under every strategy."""

import shutil

import pytest
import torch

from src.training.techniques import Techniques
from tests.helpers import kit, strategy_runs

STEPS = 4


class Average:
    """A moving average of the weights, sharded as they are."""

    def __init__(self, model):
        self.model = model
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    @torch.no_grad()
    def update(self):
        self.updates += 1
        for name, parameter in self.model.named_parameters():
            self.weights[name].lerp_(parameter, 0.3)

    def state_dict(self):
        return self.weights | {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state.pop("updates")
        self.weights = state


def _train_with_average(argv):
    import train

    update, made = train.optimizer_step, []

    class WithAverage(Techniques):
        def begin(self, run):
            made.append(Average(run.model))
            return {"average": made[0]}

    def updated(*args):
        result = update(*args)
        made[0].update()
        return result

    train.make_techniques, train.optimizer_step = lambda cfg: WithAverage(), updated
    train.main([str(word) for word in argv])
    return made[0].updates


@pytest.mark.parametrize("place", [None, "fsdp2"])
def test_average_of_weights_is_resumed_bitwise(files, tmp_path, place):
    folder, world = tmp_path / "run", 2 if place else 1
    env = strategy_runs.where(place, world) if place else None
    argv = [*strategy_runs.recipe(files, max_steps=STEPS, save_steps=2), "--output_dir", folder]

    def run(name):
        assert kit.spawn(world, _train_with_average, argv, out=tmp_path / name, env=env) == [STEPS] * world
        return kit.load_weights(folder / "checkpoints" / "step_00000004", "average")

    straight = run("straight")
    weights = kit.load_weights(folder / "final")
    assert kit.distance({n.removeprefix("model."): v for n, v in straight.items()}, weights) > 1e-4
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "checkpoints" / "step_00000004")
    assert kit.same(run("resumed"), straight)
