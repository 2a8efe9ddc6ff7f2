"""Model FLOPs per token, and the share of a GPU's peak rate that they make (MFU).

Tests: tests/reporting/test_utilization.py.
"""

import torch
from torch import nn

# Dense TFLOP/s (without sparsity) of NVIDIA's data sheets. A name is part of torch.cuda.get_device_name(); the first
# match counts. float32 products use TF32 only if PyTorch was told so, so float32 has no peak here.
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


def peak_tflops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak rate of a device's products in a 16-bit `dtype`, or None if it is not known."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


class ModelFlops:
    """FLOPs of training one token: 6 for each weight and 12 · layers · hidden size · row length for attention.

    A weight takes 2 forward, 2 for the gradient of its input and, if it is trained, 2 for its own (LoRA: 4 N for the
    base). Embeddings count only if they are the output head, too. Attention is not halved for the causal mask, as in
    the PaLM paper (arXiv:2204.02311, appendix B); what gradient checkpointing computes again does not count."""

    def __init__(self, model: nn.Module):
        config = getattr(model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        layers, hidden = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
        lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        products = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
        weights = [p for p in model.parameters() if p.dim() > 1 and (id(p) not in lookups or id(p) in products)]
        frozen = sum(p.numel() for p in weights if not p.requires_grad)
        trained = sum(p.numel() for p in weights if p.requires_grad)
        self.weights = 6 * trained + 4 * frozen
        self.attention = 12 * layers * hidden  # its products have no weights: 4 forward, 8 backward, also under LoRA

    def per_token(self, row_length: float) -> float:
        """Return the FLOPs of a token in rows of this mean length."""
        return self.weights + self.attention * row_length
