"""Schedules of addons/schedules/ as functions of completed updates; one of your own; a missing one."""

import math
import sys
from itertools import pairwise
from types import ModuleType

import pytest

from engine.config import find_addons as addons
from engine.config import run_config
from engine.config.errors import UsageError
from engine.config.find_addons import addon_names
from tests.helpers.schedules import rates


def half_cosine(begin: float, end: float, x: float) -> float:
    return end + (begin - end) * 0.5 * (1 + math.cos(math.pi * x))


def test_flat_cos_is_flat_and_then_a_cosine():
    found = rates("flat_cos", total=100, warmup=0, flat=0.75, min_lr_rate=0.1)
    assert found[:75] == [2.0] * 75
    assert found[75:] == pytest.approx([2 * half_cosine(1, 0.1, u / 25) for u in range(25)])


def test_restarts_return_to_the_peak_and_keep_the_minimum():
    found = rates("cosine_restarts_min", total=34, warmup=4, num_cycles=3, min_lr_rate=0.25)
    assert found[:5] == pytest.approx([0, 0.5, 1.0, 1.5, 2.0])
    assert [found[4], found[14], found[24]] == [2.0] * 3
    assert min(found[4:]) == pytest.approx(2 * half_cosine(1, 0.25, 0.9))


def test_range_test_grows_by_the_same_factor():
    found = rates("range_test", total=100, warmup=0, min_lr_rate=1e-4)
    assert found[0] == pytest.approx(2e-4)
    assert found[50] == pytest.approx(2e-2)
    assert [after / before for before, after in pairwise(found[:100])] == pytest.approx([10**0.04] * 99)
    with pytest.raises(UsageError, match="min_lr_rate is 0"):
        rates("range_test", total=100, warmup=0, min_lr_rate=0.0)


def test_a_schedule_of_your_own_is_one_file(tmp_path, monkeypatch):
    """Names that the run file accepts are those of the files; the file of another folder stands for a new one here."""
    assert set(addon_names("schedules")) < set(run_config.SCHEDULES)
    assert not [name for name in run_config.SCHEDULES if name.startswith("_")]
    own = ModuleType("addons.schedules.root")
    own.factor = lambda x, end=0.0: max(end, 1 - x**0.5)  # pyrefly: ignore
    (tmp_path / "schedules").mkdir()
    (tmp_path / "schedules" / "root.py").touch()
    monkeypatch.setattr(addons, "ADDONS", tmp_path)
    monkeypatch.setitem(sys.modules, "addons.schedules.root", own)
    assert rates("root", end=0.5)[4:] == pytest.approx([2 * max(0.5, 1 - (u / 36) ** 0.5) for u in range(36)])
