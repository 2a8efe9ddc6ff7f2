"""DeepSpeed ZeRO: configuration, update, and its state as named tensors.

imported only where DeepSpeed was asked for. Tests: tests/distributed/test_deepspeed.py.
"""

import torch

from src.config.errors import UsageError, warn
from src.config.schema import RunConfig
from src.distributed.sharded_tensors import ShardedTensorRef, plain_name


def configure(accelerator, cfg: RunConfig) -> None:
    """Fill in what follows from the run file, so that DeepSpeed's configuration says only where, not what."""
    from transformers.integrations import unset_hf_deepspeed_config

    plugin = accelerator.state.deepspeed_plugin
    config = plugin.deepspeed_config
    for part in ("optimizer", "scheduler"):
        if part in config:
            raise UsageError(f"the DeepSpeed configuration has a field {part}: the run file says that; take it out")
    if cfg.dtype == "float64":
        raise UsageError("dtype is float64, which DeepSpeed does not have: use accelerate_configs/fsdp2.yaml")
    if plugin.zero_stage not in (1, 2, 3):
        raise UsageError(
            f"zero_stage is {plugin.zero_stage}: give 1, 2 or 3, or for whole replicas accelerate_configs/ddp.yaml"
        )
    said = config.get("gradient_clipping", "auto")
    if said not in ("auto", cfg.max_grad_norm):
        warn(f"gradient_clipping of {said} is set for DeepSpeed and ignored: max_grad_norm is {cfg.max_grad_norm:g}")
    config["gradient_clipping"] = cfg.max_grad_norm
    # We divide by the weight of the global batch ourselves, and say which micro-batch is a window's last.
    config["gradient_accumulation_steps"] = 1
    config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed only prints it
    # Or transformers would cut a model while it reads it, differently from one that it draws. It costs a copy of the model
    # in the host memory of every process, for as long as it takes to shard it.
    unset_hf_deepspeed_config()
    if accelerator.mixed_precision == "bf16":
        config.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}


def prepare(accelerator, model_with_loss: torch.nn.Module, optimizer: torch.optim.Optimizer):
    """Return (DeepSpeed's engine, the optimizer as it shards it), with masters that are the float32 weights they were."""
    trained = {name: p.detach().clone() for name, p in model_with_loss.named_parameters() if p.requires_grad}
    engine, _ = accelerator.prepare(model_with_loss, optimizer)
    sharded = Sharded(engine, model_with_loss)
    if accelerator.mixed_precision != "no":  # the masters were copied from weights that had been rounded
        for name, parameter in model_with_loss.named_parameters():
            if name in trained:
                sharded.set(parameter, trained[name])
    return engine, sharded


def update(engine) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the engine clip and step; return the gradient's norm and whether the step was left out, on the host."""
    engine.step()
    skipped = bool(engine.optimizer.overflow)
    norm = float("nan") if skipped else float(engine.get_global_grad_norm())
    return torch.tensor(norm), torch.tensor(skipped)


class Sharded:
    """Weights and moments of a model that DeepSpeed has in pieces, by the names that any other optimizer has for them."""

    def __init__(self, engine, model_with_loss: torch.nn.Module):
        self.engine, self.model = engine, model_with_loss.model
        self.base = engine.optimizer.optimizer  # torch's, over flat pieces of many parameters
        self.param_groups, self.defaults = engine.optimizer.param_groups, self.base.defaults

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {plain_name(name): p for name, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, ShardedTensorRef | torch.Tensor]:
        """Return the model's state dict, in float32 what is trained."""
        found, made = {}, {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.nn.Parameter):
                found[name] = value
            else:  # tied ones are one piece
                found[name] = made.setdefault(id(value), ShardedTensorRef(4 * _count(value), lambda p=value: _whole(p)))
        return found

    def moments(self) -> dict[str, ShardedTensorRef | torch.Tensor]:
        """Return the optimizer's state, flat, by "key/parameter name"."""
        self._link()
        states = list(self.base.state.values())
        found = {}
        for key, value in states[0].items() if states else ():
            for name, p in self._trained().items():
                if torch.is_tensor(value) and value.dim():
                    found[f"{key}/{name}"] = ShardedTensorRef(4 * _count(p), lambda p=p, key=key: _whole(p, key))
                else:
                    found[f"{key}/{name}"] = value
        return found

    def put(self, reader, numbers: dict) -> None:
        """Put the moments where a checkpoint left them, whatever strategy wrote it."""
        trained = self._trained()
        self._make_room(dict.fromkeys(where.split("/", 1)[0] for where in reader.where if reader.shape(where)))
        for where in reader.where:
            key, name = where.split("/", 1)
            value = reader.whole(where)
            if value.dim():
                self.set(trained[name], value, key)
            else:
                for state in self.base.state.values():
                    state[key] = value.clone()
        for where, value in numbers.items():
            for state in self.base.state.values():
                state[where.split("/", 1)[0]] = value

    def _make_room(self, keys) -> None:
        """Let the optimizer have moments, which it would make itself in its first step only."""
        zero = self.engine.optimizer
        for flat in getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups:
            self.base.state[flat] |= {key: torch.zeros_like(flat) for key in keys}
        self._link()

    def _link(self) -> None:
        """Let parameters find their moments. ZeRO-1 and 2 do it after the first group's first step, when others have none."""
        zero = self.engine.optimizer
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def set(self, parameter: torch.nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        """Copy this rank's piece of a whole weight, or of a moment of it, to where the optimizer has it."""
        if not hasattr(parameter, "ds_id"):  # ZeRO-1 and 2
            parameter.set_full_hp_param(value, key)
            return
        count, rank = parameter.partition_numel(), torch.distributed.get_rank()
        piece = torch.zeros(count, dtype=torch.float32)
        mine = value.flatten()[count * rank : count * (rank + 1)]  # the last pieces may be padded
        piece[: len(mine)] = mine
        parameter._z3_optimizer.set_local_hp_param(piece, parameter, key)


def _count(parameter: torch.nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())


def _whole(parameter: torch.nn.Parameter, key: str | None = None) -> torch.Tensor:
    """Return a whole float32 weight, or a moment of it; a collective."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if key:
        return safe_get_full_optimizer_state(parameter, key)
    if parameter.requires_grad:
        return safe_get_full_fp32_param(parameter)
    with GatheredParameters([parameter]):
        return parameter.detach().clone()
