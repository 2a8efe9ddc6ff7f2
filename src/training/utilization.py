"""Use of the GPU in train lines: model FLOPs per second, their share of the peak rate (MFU), memory.

Tests: tests/src/training/test_utilization.py.
"""

import torch
from torch import nn

from engine.run.train_state import Run

# Dense 16-bit TFLOP/s (without sparsity) of NVIDIA's data sheets, by a part of the device's name; the first match counts.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10G": 70.0,
    "RTX 4090": 165.0,
    "V100": 125.0,
    "T4": 65.0,
}


def peak_tflops(device_name: str, dtype: torch.dtype | None) -> float | None:
    """Return the peak rate of a device's products in a 16-bit `dtype`, or None if it is not known."""
    if dtype not in (torch.bfloat16, torch.float16):  # float32 may or may not use TF32
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def flops_per_token(model: nn.Module, row_length: float) -> float:
    """Return the FLOPs of training one token: 6 for each weight, and 12 · layers · hidden size · row length for attention.

    A weight takes 2 forward, 2 for the gradient of its input and, if it is trained, 2 for its own (LoRA: 4 N for the
    base). Embeddings count only if they are the output head, too. Attention is not halved for the causal mask, as in
    the PaLM paper (arXiv:2204.02311, appendix B); what gradient checkpointing computes again does not count."""
    config = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(config, "num_hidden_layers", 0)
    hidden_size = getattr(config, "hidden_size", 0)
    lookup_tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear_weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    of_weights = 0
    for parameter in model.parameters():
        is_only_lookup = id(parameter) in lookup_tables and id(parameter) not in linear_weights
        if parameter.dim() > 1 and not is_only_lookup:
            of_weights += (6 if parameter.requires_grad else 4) * parameter.numel()
    # The products of attention have no weights: 4 forward, 8 backward, also under LoRA.
    of_attention = 12 * layers * hidden_size * row_length
    return of_weights + of_attention


class GpuUse:
    """Values of a train line about this process's GPU: memory, and speed if rows are of tokens. On a CPU none."""

    def __init__(self, run: Run):
        """Count the FLOPs of a token in a row of mean length."""
        accelerator = run.backend.accelerator
        stats = run.datasets["train"].stats
        self.device = accelerator.device
        self.num_processes = accelerator.num_processes
        self.flops_per_token = 0.0
        if self.device.type != "cuda":
            return
        if run.task.unit == "tokens" and stats["examples"]:  # of a stream the length is not known
            self.flops_per_token = flops_per_token(run.model, stats["tokens"] / stats["examples"])
        weight_dtype = next(run.model.parameters()).dtype
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": weight_dtype}
        dtype = dtypes.get(accelerator.mixed_precision)  # None for fp8, whose peak is not in the table
        self.peak = peak_tflops(torch.cuda.get_device_name(self.device), dtype)

    def line(self, tokens_per_second: float) -> dict[str, float]:
        """Return `gpu_memory_gib`, the peak since the last call, `tflops` of this device and, if known, `mfu`."""
        if self.device.type != "cuda":
            return {}
        values = {"gpu_memory_gib": torch.cuda.max_memory_allocated(self.device) / 2**30}
        torch.cuda.reset_peak_memory_stats(self.device)
        if self.flops_per_token:
            values["tflops"] = self.flops_per_token * tokens_per_second / self.num_processes / 1e12
            if self.peak:
                values["mfu"] = values["tflops"] / self.peak
        return values
