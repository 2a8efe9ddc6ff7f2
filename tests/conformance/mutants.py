"""Tasks with one mistake each, derived from the plain task of tests/helpers; the checks must name it."""

import random

import numpy as np
import torch

from tests.helpers import plain_task


class Task(plain_task.Task):
    """The sound task; a mutant replaces one of these methods."""

    def collate(self, rows, training):
        batch = super().collate(rows, training)
        return self.change_batch(batch, training)

    def loss(self, model, inputs):
        self.before_loss()
        sums = super().loss(model, inputs)
        return self.change_sums(sums, model, inputs)

    def change_batch(self, batch, training):
        return batch

    def before_loss(self):
        pass

    def change_sums(self, sums, model, inputs):
        return sums

    def noisy(self, batch, noise):
        """Return the batch with other numbers."""
        x = batch.inputs["x"]
        return batch._replace(inputs=batch.inputs | {"x": x + torch.as_tensor(noise, dtype=x.dtype)})


# ---- a generator without a seed --------------------------------------------------------------------------------------


class NumpyGenerator(Task):
    def change_batch(self, batch, training):
        return self.noisy(batch, np.random.default_rng().normal())


class PythonGenerator(Task):
    def change_batch(self, batch, training):
        return self.noisy(batch, random.Random().random())


class GeneratorOfTask(Task):
    """Its numbers depend on how many batches the process has collated."""

    def load(self):
        super().load()
        self.generator = torch.Generator().manual_seed(7)

    def change_batch(self, batch, training):
        return self.noisy(batch, torch.rand((), generator=self.generator))


class RareCoin(Task):
    """Flips one sign in two."""

    def change_batch(self, batch, training):
        return self.noisy(batch, np.random.default_rng().integers(2))


class TorchGenerator(Task):
    """A new torch.Generator has always the same seed."""

    def change_batch(self, batch, training):
        return self.noisy(batch, torch.rand((), generator=torch.Generator()))


class GeneratorInLoss(Task):
    def change_sums(self, sums, model, inputs):
        return sums | {"loss": sums["loss"] * np.random.default_rng().random()}


UNSEEDED = [NumpyGenerator, PythonGenerator, GeneratorOfTask, RareCoin, TorchGenerator, GeneratorInLoss]

# ---- seeds that the task sets ----------------------------------------------------------------------------------------


class TorchSeedInLoss(Task):
    """All dropout masks of a run are equal."""

    def before_loss(self):
        torch.manual_seed(0)


class TorchSeedInCollate(Task):
    def change_batch(self, batch, training):
        torch.manual_seed(int(batch.weight))
        return batch


class NumpySeedInLoss(Task):
    def before_loss(self):
        np.random.seed(0)


class PythonSeedInCollate(Task):
    def change_batch(self, batch, training):
        random.seed(0)
        return batch


RESEEDING = {
    TorchSeedInLoss: "`loss` seeds torch",
    TorchSeedInCollate: "`collate` seeds torch",
    NumpySeedInLoss: "`loss` seeds numpy",
    PythonSeedInCollate: "`collate` seeds random",
}

# ---- means -----------------------------------------------------------------------------------------------------------


def mean(value, inputs):
    return value / (inputs["y"] >= 0).sum()


class MeanLoss(Task):
    def change_sums(self, sums, model, inputs):
        return sums | {"loss": mean(sums["loss"], inputs)}


class MeanInTraining(MeanLoss):
    def change_sums(self, sums, model, inputs):
        return super().change_sums(sums, model, inputs) if model.training else sums


class MeanInEvaluation(Task):
    def change_sums(self, sums, model, inputs):
        return sums if model.training else sums | {"right": mean(sums["right"].double(), inputs)}


class ConstantWeight(Task):
    def change_batch(self, batch, training):
        return batch._replace(weight=1.0)


class MeanOfBatchSums(Task):
    def change_batch(self, batch, training):
        return batch._replace(sums={"labels": batch.weight / len(batch.inputs["y"])})


class ComparesRows(Task):
    """A loss over the batch that is not declared."""

    def change_sums(self, sums, model, inputs):
        x = inputs["x"].float()
        return sums | {"loss": torch.cdist(x, x).sum() + sums["loss"]}


MEANS = {
    MeanLoss: "`loss` of `loss` in training .* is a mean",
    MeanInTraining: "`loss` of `loss` in training .* is a mean",
    MeanInEvaluation: "`right` of `loss` in evaluation .* is a mean",
    ConstantWeight: "the weight that `collate` returns is 1 for",
    MeanOfBatchSums: "`labels` .* is a mean",
    ComparesRows: "is not a sum over the rows",
}

# ---- state that no checkpoint holds ----------------------------------------------------------------------------------

CALLS = 0


class CountsInTask(Task):
    """A schedule by the number of calls."""

    def load(self):
        super().load()
        self.calls = 0

    def before_loss(self):
        self.calls += 1


class CountsInModule(Task):
    def change_batch(self, batch, training):
        global CALLS
        CALLS += 1
        return batch


class MutableDefault(Task):
    def before_loss(self, seen=[]):  # noqa: B006
        seen.append(len(seen))


class BestSoFar(Task):
    def load(self):
        super().load()
        self.best = 0.0

    def metrics(self, sums, weight):
        self.best = max(self.best, sums["right"] / weight)
        return {"accuracy": self.best}


STATE = {
    CountsInTask: "`loss` changes self.calls",
    CountsInModule: "`collate` changes CALLS",
    MutableDefault: "`loss` changes MutableDefault.before_loss",
    BestSoFar: "`metrics` changes self.best",
}

# ---- weights and sums ------------------------------------------------------------------------------------------------


class PaddingInWeight(Task):
    """Counts the labels that are ignored."""

    def change_batch(self, batch, training):
        return batch._replace(weight=float(batch.inputs["y"].numel()))


class WidestRowInWeight(Task):
    """Counts each row as the one with the most labels, as if rows were padded to it."""

    def change_batch(self, batch, training):
        counts = (batch.inputs["y"] >= 0).sum(1)
        return batch._replace(weight=float(len(counts) * counts.max()))


class SumInBfloat16(Task):
    def change_sums(self, sums, model, inputs):
        return sums | {"loss": sums["loss"].bfloat16()}


WEIGHTS = {
    PaddingInWeight: "`targets`, as `encode` counts them",
    WidestRowInWeight: "the weight that `collate` returns is .* if each is a micro-batch",
    SumInBfloat16: "`loss` of `loss` is a sum in bfloat16",
}
