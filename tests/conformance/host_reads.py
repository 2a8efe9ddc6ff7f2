"""Places where the host reads a tensor, found on a CPU: on a GPU, it would wait there for the device.

`host_reads` is for the steps of train.py, `HostReads` for any code. Tests: tests/conformance/test_mistakes.py.
"""

import importlib.util
import sys
import sysconfig
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.process.private_apis import replaced
from tests.helpers import kit

# Methods of Tensor that return values to Python. On a CPU most of them reach no operation of torch.
METHODS = ("item", "tolist", "numpy", "cpu", "to", "__bool__", "__float__", "__int__", "__index__", "__contains__")
OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")
LIBRARIES = (
    "<",
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib")),
    str(Path(torch.__file__).parents[1]),
)
# What is read on purpose here, or in a function that is called from here, is on the host, or ready.
ON_PURPOSE = {
    ("engine/plan/data_loader.py", "collate"),  # rows
    ("engine/run/totals_and_votes.py", "sum_over_ranks"),  # counts, which were summed on the host
    ("engine/run/train_state.py", "was_skipped"),  # the last update: the next gradient is queued already
}


IN_TRANSFORMERS = ", in transformers"


def reader() -> str | None:
    """Return "file:line (function)" of the innermost code that belongs to no library; None if it reads on purpose."""
    innermost, frame, library = None, sys._getframe(1), ""
    while frame:
        file = Path(frame.f_code.co_filename)
        if not innermost and "transformers" in file.parts:
            library = IN_TRANSFORMERS
        if not str(file).startswith(LIBRARIES) and str(file) != __file__:
            shown = str(file.relative_to(kit.REPOSITORY) if file.is_relative_to(kit.REPOSITORY) else file.name)
            innermost = innermost or f"{shown}:{frame.f_lineno} ({frame.f_code.co_name})"
            if (shown, frame.f_code.co_name) in ON_PURPOSE:
                return None
        frame = frame.f_back
    return innermost and innermost + library


class HostReads(TorchDispatchMode):
    """Within, note each place where the host reads the value of a tensor, and what it calls there."""

    def __init__(self):
        super().__init__()
        self.found: dict[str, str] = {}
        self.is_paused = False

    def note(self, what: str) -> None:
        place = None if self.is_paused else reader()
        if place:
            self.found.setdefault(place, what)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype is torch.bool for i in args[1])
        if name in OPERATIONS or by_mask:
            self.note("tensor[mask]" if by_mask else name)
        return function(*args, **(kwargs or {}))

    def noting(self, name: str) -> Callable:
        """Return the method of Tensor with this name, which is noted when it is called."""
        method = getattr(torch.Tensor, name)

        @wraps(method)
        def call(*args, **kwargs):
            if name != "to" or "cpu" in [*args[1:], *kwargs.values()]:  # not the device of this run
                self.note(f"Tensor.{name}")
            return method(*args, **kwargs)

        return call

    @contextmanager
    def noted(self):
        with self, replaced({(torch.Tensor, name): self.noting(name) for name in METHODS}):
            yield self

    @contextmanager
    def generation_allowed(self, model):
        """Within, `model.generate` may read: it must know whether all rows have ended."""
        generate = getattr(model, "generate", None)

        def unnoted(*args, **kwargs):
            self.is_paused = True
            try:
                return generate(*args, **kwargs)
            finally:
                self.is_paused = False

        if generate:
            model.generate = unnoted
        yield
        if generate:
            del model.generate

    def places(self) -> str:
        return "; ".join(f"{place}: {what}" for place, what in self.found.items())


def _train(file: str, argv: list) -> list[str]:
    """Train with this train.py; return the reads between the ends of the first and the third step."""
    spec = importlib.util.spec_from_file_location("train_under_test", file)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    reads, notes, steps = HostReads(), ExitStack(), 0
    add_step = train.RunLogger.add_step

    def counted(*args, **kwargs):
        nonlocal steps
        steps += 1
        if steps == 3:
            notes.close()
        add_step(*args, **kwargs)
        if steps == 1:
            notes.enter_context(reads.noted())

    train.RunLogger.add_step = counted
    train.main([str(word) for word in argv])
    assert steps > 3
    return [f"{place}: {what}" for place, what in reads.found.items()]


def host_reads(file: Path, folder: Path, *argv) -> list[str]:
    """Return the places where two steps of a train.py make the host read a tensor, in a process of its own."""
    fields = {"max_steps": 5, "logging_steps": 1000, "save_steps": 1000, "output_dir": folder}
    return kit.spawn(1, _train, str(file), [*argv, *kit.flags(**fields)], out=folder.with_suffix(".out"))[0]
