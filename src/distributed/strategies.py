"""One strategy object: one process, DDP, FSDP2 and DeepSpeed behind the same methods.

Only make_strategy asks accelerate which of them a run uses. Strategy is one process and DDP, with or without tensor
parallelism; fsdp2.py and deepspeed.py override what differs. Tests: tests/distributed/ and tests/training/test_step.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from src.config.errors import warn
from src.config.schema import RunConfig
from src.distributed import strategy_checks, tensor_parallel
from src.distributed.sharded_tensors import is_partial, plain_name
from src.runtime import private_apis

if TYPE_CHECKING:
    from accelerate import Accelerator


def make_strategy(accelerator: "Accelerator", cfg: RunConfig) -> "Strategy":
    """Return the strategy of this launch; raise UsageError on every rank for settings that it cannot offer."""
    kind = accelerator.distributed_type.value
    if kind == "FSDP":
        from src.distributed.fsdp2 import FSDP2 as chosen
    elif kind == "DEEPSPEED":
        from src.distributed.deepspeed import DeepSpeed as chosen
    else:
        chosen = Strategy
    strategy = chosen(accelerator, cfg)
    strategy_checks.check_settings(strategy, cfg)
    return strategy


class Strategy:
    """One process, or DDP: each process holds the whole model (with tensor parallelism, its part of each layer)."""

    allows_tensor_parallel = True

    def __init__(self, accelerator: "Accelerator", cfg: RunConfig):
        self.accelerator = accelerator
        self.tp_size = tensor_parallel.tp_size(accelerator)
        # Processes of one tensor parallel group read the same data and count as one.
        self.data_rank, self.data_world_size = tensor_parallel.data_parallel_rank_and_size(accelerator)
        # Whether no process holds the whole model, so that each forward and backward pass is a collective.
        self.is_sharded = self.tp_size > 1
        # Under a gradient scaler a fused kernel would skip an update on the device, unknown to the schedule.
        self.can_fuse_optimizer = accelerator.mixed_precision != "fp16"
        self.uses_local_sgd = bool(cfg.local_sgd_steps) and accelerator.num_processes > 1

    @property
    def name(self) -> str:
        """The strategy in words, as the run plan and environment.json show it."""
        if self.tp_size > 1:
            return f"tensor parallelism over {self.tp_size} processes" + self._copies()
        if self.accelerator.num_processes == 1:
            return "one process"
        return "DDP over " + torch.distributed.get_backend()

    def _copies(self) -> str:
        mesh = self.accelerator.parallelism_config
        return f", {mesh.dp_replicate_size} copies" if mesh.dp_replicate_enabled else ""

    # ---- before training ---------------------------------------------------------------------------------------------

    def build_model(self, task: Any, weights: Any) -> torch.nn.Module:
        """Return the task's model on the CPU, with the weights of a folder or with random ones (`weights` None)."""
        if self.accelerator.mixed_precision == "fp16" and getattr(task.config, "dtype", None) is torch.bfloat16:
            warn(
                "this model was trained in bfloat16, which has the range of float32, and now computes in float16, whose largest "
                "number is 65,504: activations may overflow; prefer mixed_precision: bf16"
            )
        model = task.build(weights)
        tensor_parallel.split_layers(self.accelerator, model)
        return model

    def prepare(
        self, model_with_loss: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Return (the module to call, the optimizer to step), wrapped as this strategy needs them."""
        accelerator = self.accelerator
        module, optimizer = accelerator.prepare(model_with_loss, optimizer)
        if accelerator.scaler is None and accelerator.device.type != "xla":
            # Without a scaler accelerate's wrapper only searches the import path for a package in every step: 0.3 ms.
            optimizer = optimizer.optimizer
        wrapped = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        if wrapped and (self.uses_local_sgd or accelerator.num_processes == 1):
            # accelerate wraps one process on a CPU, too, and would reduce after every micro-batch. Under local SGD, DDP's
            # constructor has made the replicas equal; its wrapper would only reduce, and hold memory for all gradients.
            module = accelerator.unwrap_model(module)
        if self.uses_local_sgd:
            accelerator.free_memory()
        return module, optimizer

    def prepare_for_evaluation(self, model_with_loss: torch.nn.Module) -> torch.nn.Module:
        """Return the module to evaluate, sharded as in training and in the same precision."""
        if not self.is_sharded:
            return self.accelerator.prepare_model(model_with_loss, evaluation_mode=True)
        # accelerate does not shard a model that comes without an optimizer, and leaves it on the CPU.
        return self.accelerator.prepare(model_with_loss, torch.optim.SGD(model_with_loss.parameters(), lr=0.0))[0]

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def forwards_per_rank(self, window: list) -> list[float]:
        """Return this rank's entry of a vector that all ranks add up: micro-batches by rank. Empty if ranks may differ."""
        if not self.is_sharded:
            return []
        counts = [0.0] * self.data_world_size
        counts[self.data_rank] = float(len(window))
        return counts

    def pad_with_dummy_batches(self, window: list, forwards: list[float]) -> list:
        """Return the window after enough dummy batches of weight zero that all ranks run equally many forward passes."""
        micro, batch = window[0]
        dummy = replace(micro, ids=micro.ids[:1], dummy=True, last=False)
        missing = int(max(forwards, default=0)) - len(window)
        return [(dummy, batch)] * missing + window

    @contextmanager
    def gradient_sync(self, module: torch.nn.Module, last: bool) -> Iterator[None]:
        """Reduce gradients over ranks in the backward pass of a window's last micro-batch only."""
        if last:
            yield
        else:
            with self.accelerator.no_sync(module):
                yield

    def backward(self, module: torch.nn.Module, loss: torch.Tensor) -> None:
        """Add the gradient of a loss that is scaled already."""
        self.accelerator.backward(loss)

    def clip_and_step(self, module: torch.nn.Module, optimizer, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip, update and clear the gradient; return (its norm before clipping, whether the update was skipped).

        All ranks skip when the norm is not finite: it is the norm of the reduced gradient, so they decide alike. Fused
        optimizers read the decision on the device; for others the host has to wait."""
        clip = tensor_parallel.clip if self.tp_size > 1 else self.accelerator.clip_grad_norm_
        norm = clip(module.parameters(), max_norm or float("inf"))
        norm = norm.full_tensor() if is_partial(norm) else norm
        skipped = ~torch.isfinite(norm)
        first_momentum = bool(optimizer.defaults.get("momentum")) and not optimizer.state
        if self.accelerator.scaler is not None:
            optimizer.step()  # the scaler checks the gradients itself, and waits for the device
            skipped = torch.tensor(self.accelerator.optimizer_step_was_skipped)
        elif optimizer.defaults.get("fused") and not first_momentum:  # torch would leave a first momentum uninitialized
            private_apis.skip_update_on_device(optimizer, skipped)
            optimizer.step()
        elif not skipped:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm, skipped

    # ---- the state as named tensors ----------------------------------------------------------------------------------

    def named_weights(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state dict; shards as parameters, because only these tell which weights are tied."""
        values = model.state_dict(keep_vars=True).items()
        return {name: value if is_partial(value) else value.detach() for name, value in values}

    def named_moments(self, model: torch.nn.Module, optimizer) -> dict[str, Any]:
        """Return the optimizer's state, flat, by "key/parameter name"."""
        names = _parameter_names(model, optimizer)
        states = optimizer.state_dict()["state"].items()
        return {f"{key}/{names[index]}": value for index, state in states for key, value in state.items()}

    def load_moments(self, model: torch.nn.Module, optimizer, reader, numbers: dict[str, Any]) -> None:
        """Load the optimizer's state from a checkpoint that any strategy wrote: tensors by `reader`, the rest in `numbers`."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        index = {name: i for i, name in enumerate(_parameter_names(model, optimizer))}
        state: dict[int, dict[str, Any]] = {}
        for path in [*reader.where, *numbers]:
            key, name = path.split("/", 1)
            value = numbers[path] if path in numbers else reader.like(path, parameters[index[name]])
            state.setdefault(index[name], {})[key] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _parameter_names(model: torch.nn.Module, optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its state dict."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
