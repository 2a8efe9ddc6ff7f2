"""Shared test tools under one name: ranks over gloo, tiny models and data, runs in a folder, comparisons."""
# ruff: noqa: F401, F403 (tests import all names from here)

from tests.helpers.commands import *
from tests.helpers.commands import _command
from tests.helpers.ranks import *
from tests.helpers.runs import *
from tests.helpers.tiny_data import *
