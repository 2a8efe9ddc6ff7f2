"""Training with autocast to float16 and torch's gradient scaler on a CPU."""

import torch

import train


def train_in_fp16(argv, scale: float):
    """Train with autocast to float16 and a real gradient scaler, which accelerate itself gives to GPUs only."""
    start = train.init_accelerator

    def scaled(run):
        accelerator = start(run)
        accelerator.state._mixed_precision = "fp16"
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        return accelerator

    train.init_accelerator = scaled
    train.main([str(word) for word in argv])
