"""Training with autocast to float16 and torch's gradient scaler on a CPU."""

import torch

import train


def with_scaler(init_accelerator, scale: float, **options):
    """Return an init_accelerator with autocast to float16 and a gradient scaler, which accelerate gives to GPUs only."""

    def scaled(run):
        accelerator = init_accelerator(run)
        accelerator.state._mixed_precision = "fp16"
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, **options)
        return accelerator

    return scaled


def train_in_fp16(argv, scale: float):
    """Train with a gradient scaler."""
    train.init_accelerator = with_scaler(train.init_accelerator, scale)
    train.main([str(word) for word in argv])
