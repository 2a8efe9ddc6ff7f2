"""The model and the task's loss in one module, which Accelerate wraps.

Tests: tests/src/test_step.py and tests/conformance/.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.find_tasks import Task
from engine.process import private_apis


class ModelWithLoss(torch.nn.Module):
    """The module that Accelerate wraps: a model and the task's loss in one forward pass.

    Because the loss is inside, no wrapper converts, gathers or keeps logits."""

    def __init__(self, model: torch.nn.Module, task: Task):
        super().__init__()
        self.model = model
        self.task = task
        self.training_loss: Callable[..., dict[str, torch.Tensor]] | None = None  # of an add-on, instead of `task.loss`
        self.answer: Callable[..., torch.Tensor] | None = None  # within `answering`, instead of any loss
        private_apis.set_layer_class_names(self, private_apis.layer_class_names(self))
        self.tied = tied_names(model)

    def tie_weights(self) -> None:
        """Tie weights again: accelerate shards a copy of the model on the meta device, which has lost the ties."""
        for first, *others in self.tied:
            parameter = self.model.get_parameter(first)
            for name in others:
                path, _, leaf = name.rpartition(".")
                self.model.get_submodule(path).register_parameter(leaf, parameter)

    @contextmanager
    def answering(self, answer: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Within, a call returns the `generated` tokens of `answer(model, inputs)`.

        They are generated within a call of this module because that gathers the weights of a sharded one."""
        self.answer = answer
        try:
            yield
        finally:
            self.answer = None

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.answer is not None:
            return {"generated": self.answer(self.model, inputs)}
        loss = self.training_loss if self.training and self.training_loss else self.task.loss
        return loss(self.model, inputs)


def tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [names_of_one for names_of_one in names.values() if len(names_of_one) > 1]
