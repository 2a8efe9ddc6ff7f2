"""Runs that are killed at a chosen step: every rank ends as by SIGKILL, without cleanup."""

import os

import pytest

import train
from engine.checkpointing import async_writer
from tests.helpers import kit


def train_until_killed(step: int, world: int, folder, *flags, env=None) -> None:
    """Train in `folder` until all ranks die in the middle of `step`, when all checkpoints before it are written."""
    original = train.compute_gradient

    def gradient(*args):
        [batch] = [arg for arg in args if isinstance(arg, list)]
        if batch[0][0].step == step - 1:
            async_writer.finish_writing()
            os._exit(9)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "compute_gradient", gradient)
        with pytest.raises(kit.RankFailed) as failed:
            kit.run_training(world, folder, *flags, env=env)
    assert set(failed.value.codes) == {9}, failed.value
