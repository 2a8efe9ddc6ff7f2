"""Stochastic depth: the option `stochastic_depth`, and the check of models that skip whole layers.

After Huang et al. 2016, "Deep Networks with Stochastic Depth". Tests: tests/models/test_stochastic_depth.py.
"""

from typing import TYPE_CHECKING

import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from src.distributed.strategies import Strategy

BY_ROW = "drop_path_rate"  # field of transformers' configs: a layer is dropped for some rows of a micro-batch
BY_LAYER = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # for all rows: it is not computed


def set_stochastic_depth(cfg: RunConfig, config: "PreTrainedConfig") -> None:
    """Set the fields of a model's config to `stochastic_depth`, if given; raise UsageError if it has none."""
    if cfg.stochastic_depth is None:
        return
    names = [name for name in (BY_ROW, *BY_LAYER) if getattr(config, name, None) is not None]
    if not names:
        raise UsageError(
            f"stochastic_depth is {cfg.stochastic_depth}, but the config of {config.model_type} has none of the fields "
            f"{', '.join((BY_ROW, *BY_LAYER))}: remove it, or use another model (convnext, swin, dinov2, bart, …)"
        )
    for name in names:
        setattr(config, name, cfg.stochastic_depth)


def check_skipped_layers(strategy: "Strategy", model: torch.nn.Module) -> None:
    """Raise UsageError if processes would skip different layers of `model` and wait for each other's."""
    if strategy.accelerator.num_processes == 1 or strategy.uses_local_sgd:
        return
    if strategy.cfg.ddp_find_unused_parameters and not strategy.is_sharded:
        return
    fix = "use DDP" if strategy.is_sharded else "set --ddp_find_unused_parameters true"
    for name in BY_LAYER:
        value = getattr(getattr(model, "config", None), name, None)
        if isinstance(value, int | float) and value > 0:
            raise UsageError(
                f"{name} of the model is {value:g}: processes skip different layers, and {strategy.name} would wait for "
                f"them: {fix}, or set it to 0 with --stochastic_depth 0"
            )
