"""Files of samples/ that a fork would add."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from engine.storage import cache_folder


def add_sample(name: str, code: str, folder: Path, monkeypatch) -> ModuleType:
    """Write samples/NAME.py with this code in `folder`, the only one that engine/ then sees; return its module."""
    file = folder / "samples" / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(f"samples.{name}", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(cache_folder, "REPOSITORY", folder)
    return module
