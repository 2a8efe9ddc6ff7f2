"""The structure of a model without its values: parameters, ties, buffers and settings, made alike on all ranks.

Under FSDP2 only rank 0 reads the weights, and some of the structure depends on them: a head of its own under a
configuration that says tied, a buffer, a layer that is frozen. Tests: tests/engine/distributed/test_model_structure.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.config.errors import UsageError

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class TensorSpec:
    """A parameter or buffer without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    flag: bool  # of a parameter: whether it is trained; of a buffer: whether checkpoints hold it

    def fits(self, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype


@dataclass(frozen=True)
class Structure:
    """What all ranks must have alike before rank 0 sends its values, by the names of the model and in its order."""

    parameters: dict[str, TensorSpec]  # a tied parameter under each of its names
    first_names: dict[str, str]  # name of a parameter -> first name of the same parameter
    buffers: dict[str, TensorSpec]
    settings: dict[str, dict[str, Any]]  # path of a module with a `config` -> the plain values in it


def structure_of(model: torch.nn.Module) -> Structure:
    """Return the structure of a model."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    saved = model.state_dict().keys()
    first_names: dict[int, str] = {}  # by id of the parameter
    for name, parameter in parameters.items():
        first_names.setdefault(id(parameter), name)
    return Structure(
        parameters={name: _spec(p, p.requires_grad) for name, p in parameters.items()},
        first_names={name: first_names[id(p)] for name, p in parameters.items()},
        buffers={name: _spec(buffer, name in saved) for name, buffer in buffers.items()},
        settings={path: _plain_values(config) for path, config in _configs(model).items()},
    )


def _spec(tensor: torch.Tensor, flag: bool) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype, flag)


def _configs(model: torch.nn.Module) -> dict[str, Any]:
    """Return the object `config` of each module that has one of its own or shares it, by path."""
    configs = {path: getattr(module, "config", None) for path, module in model.named_modules()}
    return {path: config for path, config in configs.items() if hasattr(config, "__dict__")}


def _plain_values(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if isinstance(value, PLAIN)}


# ---- the other ranks -------------------------------------------------------------------------------------------------


def make_alike(model: torch.nn.Module, wanted: Structure) -> None:
    """Give a model without values the structure `wanted`, in place; raise UsageError if its modules are others.

    A parameter that is tied here only gets memory of its own, and the other way round; buffers are added and removed."""
    try:
        _make_parameters_alike(model, wanted)
        _make_buffers_alike(model, wanted)
    except AttributeError as error:  # a module is missing
        difference: str | None = str(error)
    else:
        difference = _first_difference(structure_of(model), wanted)
    if difference:
        raise UsageError(
            f"ranks without weights build another {type(model).__name__} than rank 0, which has them ({difference}): `build` of "
            "the task must make the same modules with `empty`, or set fsdp_cpu_ram_efficient_loading to false"
        )
    for path, config in _configs(model).items():
        vars(config).update(wanted.settings.get(path, {}))


def _make_parameters_alike(model: torch.nn.Module, wanted: Structure) -> None:
    present = dict(model.named_parameters(remove_duplicate=False))
    chosen: dict[str, torch.nn.Parameter] = {}  # by first name
    taken: set[int] = set()  # their ids
    for name, spec in wanted.parameters.items():
        first = wanted.first_names[name]
        if first == name:
            parameter = present.get(name)
            if parameter is None or id(parameter) in taken or not spec.fits(parameter):
                parameter = torch.nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype), requires_grad=False)
            taken.add(id(parameter))
            chosen[name] = parameter.requires_grad_(spec.flag)
        if present.get(name) is not chosen[first]:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path).register_parameter(leaf, chosen[first])


def _make_buffers_alike(model: torch.nn.Module, wanted: Structure) -> None:
    present = dict(model.named_buffers(remove_duplicate=False))
    current = structure_of(model).buffers
    for name in present.keys() - wanted.buffers.keys():
        path, _, leaf = name.rpartition(".")
        delattr(model.get_submodule(path), leaf)
    for name, spec in wanted.buffers.items():
        if current.get(name) != spec:
            path, _, leaf = name.rpartition(".")
            buffer = present[name] if spec.fits(present.get(name)) else torch.empty(spec.shape, dtype=spec.dtype)
            model.get_submodule(path).register_buffer(leaf, buffer, persistent=spec.flag)


def _first_difference(here: Structure, wanted: Structure) -> str | None:
    """Return the first parameter or buffer, in the order of the model, in which two structures differ."""
    for what in ("parameters", "first_names", "buffers"):
        mine = getattr(here, what)
        others = getattr(wanted, what)
        if list(mine.items()) != list(others.items()):
            names = [name for name in {**others, **mine} if mine.get(name) != others.get(name)]
            return names[0] if names else f"the order of {what}"
    return None
