"""DeepSpeed ZeRO: configuration, optimizer step, weights and optimizer state as named tensors.

Tests: tests/addons/backends/test_deepspeed.py.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from engine.config.errors import UsageError, warn
from engine.config.optimizer_class import BUILT_IN
from engine.config.run_config import RunConfig
from engine.distributed.backends import Backend
from engine.distributed.sharded_tensors import ShardedTensorRef, plain_name
from engine.run.memory import moment_bytes

if TYPE_CHECKING:
    from accelerate import Accelerator


class DeepSpeed(Backend):
    """ZeRO-1, 2 and 3: DeepSpeed's engine runs the backward pass, clips and updates."""

    is_sharded = True
    unsupported = ("ddp_find_unused_parameters", "peft")

    def __init__(self, accelerator: "Accelerator", cfg: RunConfig):
        super().__init__(accelerator, cfg)
        _configure(accelerator, cfg)
        self.accelerator: Any = AcceleratorOfEngine(accelerator, self.backward)

    @property
    def name(self) -> str:
        return f"DeepSpeed ZeRO-{self.accelerator.state.deepspeed_plugin.zero_stage}"

    def wrap(self, model_with_loss: torch.nn.Module, optimizer: torch.optim.Optimizer):
        """Return (DeepSpeed engine, its sharded optimizer); its float32 master weights are those of the given model."""
        originals = {name: p.detach().clone() for name, p in model_with_loss.named_parameters() if p.requires_grad}
        self.engine, _ = self.accelerator.prepare(model_with_loss, optimizer)
        if self.accelerator.mixed_precision != "no":  # DeepSpeed has copied the master weights from rounded ones
            for name, parameter in model_with_loss.named_parameters():
                if name in originals:
                    set_shard(parameter, originals[name])
        return self.engine, self.engine.optimizer

    # ---- in a step ---------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, module: torch.nn.Module, unless: bool) -> Iterator[None]:
        """Tell the engine whether this micro-batch is the last of the step."""
        module.set_gradient_accumulation_boundary(unless)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the engine, in the place of accelerate's."""
        if self.is_first_step:
            self._check_same_parameters(loss)
        self.engine.backward(loss, scale_wrt_gas=False)

    def _check_same_parameters(self, loss: torch.Tensor) -> None:
        """Raise UsageError on all ranks if they use different parameters: ZeRO would add their gradients. A collective."""
        reached = {id(p) for p in reached_parameters(loss)}
        unused = [name for name in sorted(self.trainable) if id(self.parameters[name]) not in reached]
        if len(differing := self.hosts.union({", ".join(unused)})) > 1:
            raise UsageError(
                f"the loss does not use the same parameters on all ranks ({' / '.join(name or 'all' for name in differing)} are "
                f"not used), which {self.name} does not support: use DDP or FSDP2 (accelerate_configs/fsdp2.yaml)"
            )

    def clip_grad_norm(self, module: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Let the engine clip and update, which it does in one call; return the gradient norm as a host tensor."""
        module.step()
        skipped = bool(module.optimizer.overflow)
        return torch.tensor(float("nan") if skipped else float(module.get_global_grad_norm()))

    def must_skip(self, norm: torch.Tensor) -> torch.Tensor:
        """Return whether the engine has skipped the update."""
        return torch.tensor(bool(self.engine.optimizer.overflow))

    def allows_step(self, optimizer: Any, skipped: torch.Tensor) -> bool:
        """Return False: the engine has updated the weights, or skipped that, in `clip_grad_norm`."""
        return False

    # ---- weights and optimizer state as named tensors ----------------------------------------------------------------

    def named_weights(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state dict with a ShardedTensorRef for each parameter; trainable ones gather in float32."""
        weights: dict[str, Any] = {}
        refs: dict[int, ShardedTensorRef] = {}  # by id of the parameter: tied parameters share a ref
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.nn.Parameter):
                value = refs.setdefault(id(value), _weight_ref(value))
            weights[name] = value
        return weights

    def named_moments(self, model: torch.nn.Module, optimizer) -> dict[str, Any]:
        """Return the optimizer state as a flat dict with keys such as "exp_avg/layers.0.weight"."""
        link_moments(self.engine.optimizer)
        moments: dict[str, Any] = {}
        states = list(self.engine.optimizer.optimizer.state.values())
        for key, value in states[0].items() if states else ():
            for name, parameter in _trained(model).items():
                sharded = torch.is_tensor(value) and value.dim()
                moments[f"{key}/{name}"] = _moment_ref(parameter, key) if sharded else value
        return moments

    def load_moments(self, model: torch.nn.Module, optimizer, reader, numbers: dict[str, Any]) -> None:
        """Load an optimizer state that any backend saved: `reader` reads its tensors, `numbers` holds its numbers."""
        trained, states = _trained(model), self.engine.optimizer.optimizer.state
        for flat in flat_weights(self.engine.optimizer):  # the optimizer itself would allocate them in its first step
            for key in {path.split("/", 1)[0] for path in reader.where if reader.shape(path)}:
                states[flat][key] = torch.zeros_like(flat)
        link_moments(self.engine.optimizer)
        for path in reader.where:
            key, name = path.split("/", 1)
            value = reader.full(path)
            if value.dim():
                set_shard(trained[name], value, key)
            else:
                for state in states.values():
                    state[key] = value.clone()
        for path, value in numbers.items():
            for state in states.values():
                state[path.split("/", 1)[0]] = value


def backend_type(accelerator: "Accelerator") -> type[DeepSpeed] | None:
    """Return the class for a launch with DeepSpeed, None for any other, and for one that also splits layers."""
    mesh = accelerator.parallelism_config
    splits_layers = mesh is not None and mesh.tp_size > 1
    return DeepSpeed if accelerator.distributed_type.value == "DEEPSPEED" and not splits_layers else None


class AcceleratorOfEngine:
    """The Accelerator, with a backward pass that updates no weights: accelerate's own would, after each one."""

    def __init__(self, accelerator: "Accelerator", backward: Callable[[torch.Tensor], None]):
        self._accelerator = accelerator
        self.backward = backward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def reached_parameters(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves that get a gradient in the backward pass of `loss`."""
    nodes, seen, leaves = [loss.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves


def check_fields(plugin: Any, cfg: RunConfig) -> None:
    """Raise UsageError for what the run file and DeepSpeed's configuration may not have together."""
    for name in ("optimizer", "scheduler"):
        if name in plugin.deepspeed_config:
            raise UsageError(f"the DeepSpeed configuration has a field {name}, which the run file sets: remove it")
    if cfg.optim not in BUILT_IN:
        raise UsageError(
            f"optim is {cfg.optim}, but DeepSpeed shards all parameters as one vector, without their shapes: use adamw or sgd, "
            "or FSDP2 (accelerate_configs/fsdp2.yaml)"
        )
    if cfg.dtype == "float64":
        raise UsageError("dtype is float64, which DeepSpeed does not support: use accelerate_configs/fsdp2.yaml")
    if plugin.zero_stage not in (1, 2, 3):
        raise UsageError(f"zero_stage is {plugin.zero_stage}: give 1, 2 or 3, or use accelerate_configs/ddp.yaml")


def _configure(accelerator: "Accelerator", cfg: RunConfig) -> None:
    """Complete DeepSpeed's configuration from the run file (YAML); raise UsageError if the two conflict."""
    from transformers.integrations import unset_hf_deepspeed_config

    plugin = accelerator.state.deepspeed_plugin
    config = plugin.deepspeed_config
    check_fields(plugin, cfg)
    world, sizes = accelerator.num_processes, "global_batch_size and per_device_batch_size"
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")  # init_accelerator.py has warned of them
    values = {  # name -> (what DeepSpeed gets, other values that are not worth a warning, what the run file sets)
        "gradient_clipping": (cfg.max_grad_norm, (), f"max_grad_norm {cfg.max_grad_norm:g}"),
        # 1, because compute_gradient scales the loss, and no_sync marks the last micro-batch of each step.
        "gradient_accumulation_steps": (1, (int(steps),) if steps.isdigit() else (), sizes),
        "train_micro_batch_size_per_gpu": (1, (cfg.per_device_batch_size,), sizes),  # DeepSpeed only prints it
        "train_batch_size": (world, (cfg.global_batch_size,), sizes),
    }
    for name, (value, others, fields) in values.items():
        if (given := config.get(name, "auto")) not in ("auto", value, *others):
            warn(f"{name} {given} in the DeepSpeed configuration is ignored: the run file sets {fields}")
        config[name] = value
    # Otherwise transformers would shard pretrained weights while it loads them, but not random weights. The price:
    # every process holds the whole model in host memory until DeepSpeed shards it.
    unset_hf_deepspeed_config()
    if accelerator.mixed_precision == "bf16":
        config.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}


def memory_of_launch(cfg: RunConfig, parameters: int, trained: int, copies: int) -> tuple[str, dict[str, float], bool]:
    """Return (name, bytes that a process keeps between steps, whether they are in host memory), by the launcher's
    variables. `copies` of the trained weights, in float32, count as weights."""
    shards, stage = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))
    width = getattr(torch, cfg.dtype).itemsize
    compute = 2 if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no" and cfg.dtype == "float32" else width
    # DeepSpeed adds a float32 master copy, sharded at every stage, even if the weights are float32.
    weights = compute * parameters / (shards if stage == 3 else 1) + (1 + copies) * 4 * trained / shards
    gradients = 4 * trained / (shards if stage > 1 else 1)
    moments = moment_bytes(cfg, trained, width * trained) / shards
    offload = os.environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none") != "none"
    return f"ZeRO-{stage}", {"weights": weights, "gradients": gradients, "optimizer": moments}, offload


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def _float32_bytes(parameter: torch.nn.Parameter) -> int:
    return 4 * getattr(parameter, "ds_numel", parameter.numel())


def _weight_ref(parameter: torch.nn.Parameter) -> ShardedTensorRef:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    def gather() -> torch.Tensor:
        if parameter.requires_grad:
            return safe_get_full_fp32_param(parameter)
        with GatheredParameters([parameter]):
            return parameter.detach().clone()

    return ShardedTensorRef(_float32_bytes(parameter), gather)


def _moment_ref(parameter: torch.nn.Parameter, key: str) -> ShardedTensorRef:
    from deepspeed.utils import safe_get_full_optimizer_state

    return ShardedTensorRef(_float32_bytes(parameter), lambda: safe_get_full_optimizer_state(parameter, key))


# ---- private APIs of DeepSpeed 0.19; the tests named above fail if one has changed ---------------------------------------


def flat_weights(optimizer: Any) -> list[torch.Tensor]:
    """Return the flat float32 weights that the base optimizer of a ZeRO optimizer updates."""
    return getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups


def link_moments(zero_optimizer: Any) -> None:
    """Link parameters to their optimizer state again: ZeRO-1 and 2 do this when only the first group has a state."""
    if hasattr(zero_optimizer, "_lazy_init_hp_params_optimizer_state"):
        zero_optimizer._hp_optimizer_states_linked = False
        zero_optimizer._lazy_init_hp_params_optimizer_state()


def set_shard(parameter: torch.nn.Parameter, full: torch.Tensor, key: str | None = None) -> None:
    """Copy this rank's shard of a full weight, or of its optimizer moment `key`, into the optimizer."""
    if not hasattr(parameter, "ds_id"):  # ZeRO-1 and 2
        parameter.set_full_hp_param(full, key)
        return
    count, rank = parameter.partition_numel(), torch.distributed.get_rank()
    mine = full.flatten()[count * rank : count * (rank + 1)]
    shard = torch.zeros(count, dtype=torch.float32)  # the last shards are padded
    shard[: len(mine)] = mine
    parameter._z3_optimizer.set_local_hp_param(shard, parameter, key)
