"""Distributed backends with one interface: one process, DDP and FSDP2; addons/backends/ has others.

The class Backend is one process and DDP; fsdp2.py and the add-ons override the methods that differ.
Tests: tests/engine/distributed/ and tests/src/test_step.py.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.distributed import backend_checks, optimizer_state
from engine.distributed.exact_sums import GradientSums, deterministic_or_refused, join_values, split_values
from engine.distributed.host_group import HostGroup, run_on_main
from engine.distributed.running_statistics import StepBuffers, all_buffers_unchanged
from engine.distributed.sharded_tensors import is_partial, plain_name
from engine.process import private_apis

if TYPE_CHECKING:
    from accelerate import Accelerator


class Backend:
    """One process, or DDP: each process holds the whole model."""

    ranks_per_batch = 1  # processes that compute each micro-batch together; each of them reads the same data
    is_sharded = False  # whether the model is sharded: then each forward and backward pass is a collective
    unsupported: tuple[str, ...] = ()  # fields of the run file that must not be set

    def __init__(self, accelerator: "Accelerator", cfg: RunConfig):
        self.accelerator = accelerator
        self.cfg = cfg
        # Processes that read the same data count as one data rank.
        self.data_rank = accelerator.process_index // self.ranks_per_batch
        self.data_world_size = accelerator.num_processes // self.ranks_per_batch
        # With a gradient scaler (fp16), a fused kernel would skip updates unnoticed by the learning rate schedule.
        self.can_fuse_optimizer = accelerator.mixed_precision != "fp16"
        self.is_first_step = True  # of this process, until its gradient is there
        self.is_unscaled = False  # whether the scale of fp16 is already out of `.grad` in this step
        self.sums: GradientSums | None = None  # `exact_sums`: in place of DDP
        self.skip_rules: list[Callable] = []  # of techniques: norm of the gradient -> skip its update? On the device

    @property
    def name(self) -> str:
        """Return the backend in words, for the run plan and environment.json."""
        if self.accelerator.num_processes == 1:
            return "one process"
        return "DDP over " + torch.distributed.get_backend()

    @cached_property
    def hosts(self) -> HostGroup:
        """The group in which all ranks sum small vectors on the host; its first use is a collective."""
        return HostGroup(self.accelerator, self.cfg.ddp_timeout, self.ranks_per_batch, self.cfg.exact_sums)

    # ---- before training ---------------------------------------------------------------------------------------------

    def build_model(
        self, task: Any, weights: Any, on_built: Callable[[torch.nn.Module], None] | None = None
    ) -> torch.nn.Module:
        """Return the task's model on the CPU with the weights in the folder `weights`; None: those that the run file
        names, or random ones. `on_built` is called with the model before add-ons change it."""
        model = task.build_model(weights, on_built=on_built)
        if self.accelerator.device.type == "cpu":
            private_apis.copy_mapped_weights(model)
        return model

    def prepare(
        self, model_with_loss: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Return (the module to call, the optimizer to step), wrapped as this backend needs them."""
        backend_checks.check_model(self, model_with_loss, optimizer)
        for group in optimizer.param_groups:  # a step sets the rate of each group to the schedule's times this factor
            group["lr_factor"] = group.get("lr_factor", 1.0) * self.own_factor(group)
        module, optimizer = self.wrap(model_with_loss, optimizer)
        self.parameters = {plain_name(name): p for name, p in model_with_loss.named_parameters()}
        self.trainable = {name for name, p in self.parameters.items() if p.requires_grad}
        all_ranks = self.accelerator.num_processes > 1
        self.buffers = StepBuffers(model_with_loss, self.accelerator.device, all_ranks, self.cfg.exact_sums)
        self.buffers.add_hooks()
        if self.cfg.exact_sums:
            trained = [p for p in self.parameters.values() if p.requires_grad]
            self.sums = GradientSums(trained, self.hosts, self.accelerator.device)
        return module, optimizer

    def own_factor(self, group: dict) -> float:
        """Return the rate that the class of the optimizer gave a group, as a factor of learning_rate."""
        rate = group.get("lr", 0.0)
        base = self.cfg.learning_rate
        if rate == base:
            return 1.0
        if not base:
            raise UsageError(
                f"learning_rate is 0, but optim {self.cfg.optim} gives a group the rate {rate:g}, which is trained at a factor "
                "of learning_rate: give another learning_rate"
            )
        return rate / base

    def wrap(
        self, model_with_loss: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Return what `prepare` returns; each backend defines it."""
        accelerator = self.accelerator
        module, optimizer = accelerator.prepare(model_with_loss, optimizer)
        if accelerator.scaler is None and accelerator.device.type != "xla":
            # Without a gradient scaler, all that accelerate's wrapper adds is an import check of 0.3 ms per step.
            optimizer = optimizer.optimizer
        is_ddp = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        if is_ddp and (accelerator.num_processes == 1 or self.cfg.exact_sums):
            # Remove DDP. On a CPU, accelerate wraps one process, too, and would all-reduce after every micro-batch.
            module = private_apis.remove_ddp(accelerator, module)
        return module, optimizer

    def prepare_for_evaluation(self, model_with_loss: torch.nn.Module) -> torch.nn.Module:
        """Return the module to evaluate, sharded as in training and in the same precision."""
        if not self.is_sharded:
            return self.accelerator.prepare_model(model_with_loss, evaluation_mode=True)
        # Without an optimizer, accelerate would neither shard the model nor move it to the device.
        module, _ = self.wrap(model_with_loss, torch.optim.SGD(model_with_loss.parameters(), lr=0.0))
        return module

    # ---- in an evaluation --------------------------------------------------------------------------------------------

    def share_of_rank(self, micro_batches: list[Any], rounds: int) -> list[Any]:
        """Return the micro-batches of this rank; a sharded model gets dummies, because each pass is a collective."""
        mine = micro_batches[self.data_rank :: self.data_world_size]
        if not self.is_sharded:
            return mine
        dummy = replace(micro_batches[0], dummy=True)
        return mine + [dummy] * (rounds - len(mine))

    @contextmanager
    def evaluating(self, module: torch.nn.Module, few_shapes: bool) -> Iterator[None]:
        """Set evaluation mode, and compute as eval.py does, which therefore gets the same loss: attention is chosen by the
        rows that are evaluated (`few_shapes`), compiled layers run uncompiled, and a CPU has one thread."""
        was_training = module.training
        training_uses_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        module.eval()
        torch.backends.cuda.enable_cudnn_sdp(few_shapes)
        try:
            with (
                torch.compiler.set_stance("force_eager") if self.cfg.compile else nullcontext(),
                one_thread() if self.accelerator.device.type == "cpu" else nullcontext(),
            ):
                yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(training_uses_cudnn)
            module.train(was_training)

    def compute_on_main(self, compute: Callable[[], Any]) -> Any:
        """Compute metrics on the main process and broadcast them: all ranks decide by them (best model, early stop)."""
        with one_thread():
            return run_on_main(self.accelerator, compute)

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def forwards_per_rank(self, batch: list) -> list[float]:
        """Return a zero vector with this rank's micro-batch count at its index, or [] if counts may differ by rank."""
        if not self.is_sharded:
            return []
        counts = [0.0] * self.data_world_size
        counts[self.data_rank] = float(len(batch))
        return counts

    def pad_with_dummy_batches(self, batch: list, forwards: list[float]) -> list:
        """Return the batch with dummy batches (weight zero) in front, so that every rank runs max(forwards) passes."""
        if not forwards:
            return batch
        micro, rows = batch[0]
        dummy = replace(micro, ids=micro.ids[:1], dummy=True, last=False)
        num_dummies = int(max(forwards)) - len(batch)
        return [(dummy, rows)] * num_dummies + batch

    def wrap_gradient(self, compute: Callable) -> Callable:
        """Return `compute`, such as compute_gradient of train.py, with what this backend does around it.

        That is: raise UsageError if a parameter was frozen or unfrozen, or if DDP waits for a gradient; add dummy batches
        to those of a sharded model; set buffers that forward passes change (running statistics) to their mean over the
        micro-batches. On three DDP ranks or more, the first gradient of a process is computed twice: DDP reorders its
        buckets after the first backward pass, and that order decides how sums round. So a resumed run has the order of
        an undisturbed one."""

        def compute_once(backend: Any, module: torch.nn.Module, batch: list, totals: Any) -> Any:
            backend_checks.check_trainable(self.parameters, self.trainable)
            batch = self.pad_with_dummy_batches(batch, totals.forwards)
            is_real = [not micro.dummy for micro, _ in batch]
            with self.buffers.step(is_real), self.exact_step(is_real):
                losses = compute(backend, module, batch, totals)
                backend_checks.check_all_gradients_reduced(module, self.parameters)
            self.is_first_step = False
            return losses

        def compute_first_twice(backend: Any, module: torch.nn.Module, batch: list, totals: Any) -> Any:
            if self.is_first_step:
                with all_buffers_unchanged(module):
                    compute_once(backend, module, batch, totals)
                module.zero_grad(set_to_none=True)
            return compute_once(backend, module, batch, totals)

        return compute_first_twice if self.reorders_buckets else compute_once

    @property
    def reorders_buckets(self) -> bool:
        """Return whether the sums of gradients are rounded otherwise after the first backward pass of a process."""
        is_ddp = self.accelerator.num_processes > 2 and not self.is_sharded
        # PowerSGD keeps the error of each step, so a second pass would count. DDP orders no buckets with find_unused.
        keeps_errors = self.cfg.ddp_comm_hook in ("power_sgd", "batched_power_sgd")
        return is_ddp and not keeps_errors and not self.cfg.ddp_find_unused_parameters and self.sums is None

    def loss_scale(self, totals: Any) -> float:
        """Return the factor of a micro-batch's sum of losses that makes the gradient that of the mean over the global
        batch: backends average over ranks, so it contains their number; exact sums do not, because a mean rounds."""
        self.is_scaled = True
        return (1 if self.cfg.exact_sums else self.data_world_size) / totals.weight

    def sum_over_micro_batches(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the first dimension, one entry per micro-batch of this rank, and over all ranks."""
        is_exact = self.cfg.exact_sums
        total: Any = split_values(values).sum(1) if is_exact else sum(values[1:], values[0])
        total = self.accelerator.reduce(total, "sum")
        return join_values(total).to(values.dtype) if is_exact else total

    @contextmanager
    def exact_step(self, is_real: list[bool]) -> Iterator[None]:
        """Within, add gradients exactly, if the run asks for it."""
        if self.sums is None:
            yield
            return
        backend_checks.check_addends(len(is_real) * self.data_world_size)
        scaler = self.accelerator.scaler
        self.is_scaled = False
        with self.sums.step(any(is_real), 1.0 if scaler is None else scaler.get_scale()), deterministic_or_refused():
            yield
            backend_checks.check_scaled(self.is_scaled)

    @contextmanager
    def no_sync(self, module: torch.nn.Module, unless: bool) -> Iterator[None]:
        """Do not reduce gradients in the backward pass within, unless it is of the last micro-batch of the step."""
        if unless or self.accelerator.num_processes == 1 or self.sums is not None:
            yield
        else:
            with self.accelerator.no_sync(module):
                yield

    def unscale_gradients(self) -> None:
        """Divide `.grad` by the loss scale of fp16, once per step; without a gradient scaler, do nothing."""
        if self.accelerator.scaler is not None and not self.is_unscaled:
            self.accelerator.unscale_gradients()
            self.is_unscaled = True

    def clip(self, parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip the gradient to a norm of `max_norm`; return its norm before clipping."""
        accelerator = self.accelerator
        if accelerator.scaler is None and (self.is_sharded or accelerator.device.type == "xla"):
            return accelerator.clip_grad_norm_(parameters, max_norm)
        # The same for plain tensors, in half the time; with a scaler, accelerate's would unscale again.
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_norm(self, module: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the gradient to `max_norm`, if it is not 0; return its norm before clipping, on the device."""
        self.unscale_gradients()
        norm = self.clip(self.parameters.values(), max_norm or float("inf"))  # faster than `module.parameters()`
        return norm.full_tensor() if is_partial(norm) else norm

    def must_skip(self, norm: torch.Tensor) -> torch.Tensor:
        """Return whether to skip the update, a bool on the device: the gradient's `norm` is not finite, or one of
        `skip_rules` says so. The norm is that of the reduced gradient, so all ranks decide alike."""
        skipped = ~torch.isfinite(norm)
        for rule in self.skip_rules:
            skipped = skipped | rule(norm)
        return skipped

    def allows_step(self, optimizer: Any, skipped: torch.Tensor) -> bool:
        """Return whether to call the optimizer's `step`, which does nothing on the device if `skipped` is true there.

        Fused optimizers can do so. For others the host waits for `skipped`, as it does under fp16."""
        scaler = self.accelerator.scaler
        if scaler is not None:
            self.is_unscaled = False
            if skipped:
                scaler.update()  # `step` of accelerate's optimizer would do it; a gradient that is not finite halves the scale
            return not skipped
        if optimizer.defaults.get("fused"):
            private_apis.skip_update_on_device(optimizer, skipped)
            return True
        return not skipped

    # ---- weights and optimizer state as named tensors ----------------------------------------------------------------

    def named_weights(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state dict with the parameters themselves: tied ones are recognized as the same object."""
        return model.state_dict(keep_vars=True)

    def named_moments(self, model: torch.nn.Module, optimizer) -> dict[str, Any]:
        """Return the optimizer state as a flat dict with keys such as "exp_avg/layers.0.weight"."""
        return optimizer_state.flatten(model, optimizer)

    def load_moments(self, model: torch.nn.Module, optimizer, reader, numbers: dict[str, Any]) -> None:
        """Load an optimizer state that any backend saved: `reader` reads its tensors, `numbers` holds its numbers."""
        optimizer_state.restore(model, optimizer, reader, numbers)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit the CPU to one thread, because the last bits of a matrix product depend on the number of threads.

    The other cores are then idle. More processes (make eval NPROC=4) use them and give the same result."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
