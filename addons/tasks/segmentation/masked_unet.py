"""A U-Net for images of different sizes: padding stays zero in every layer, so it never reaches a real pixel.

A convolution next to padded pixels would read what its own bias, or that of the layer before, has put there; then the
loss of an image would depend on the others in its micro-batch. Tests: tests/addons/tasks/test_segmentation.py.
"""

import itertools

import torch
import torch.nn.functional as F


class ConvBlock(torch.nn.Module):
    """Two 3 × 3 convolutions with ReLU; padding is set to zero after each.

    No norm: batch and group norm would count padding, and a norm of each pixel makes noise as large as the image."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        self.first = torch.nn.Conv2d(channels_in, channels, 3, padding=1)
        self.second = torch.nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x)) * mask
        return F.relu(self.second(x)) * mask


class MaskedUNet(torch.nn.Module):
    """U-Net with one level for each of `widths`; each level halves the resolution of the one before."""

    _no_split_modules = ["ConvBlock"]  # what FSDP2 shards as one unit

    def __init__(self, channels: int, classes: int, widths: list[int]):
        super().__init__()
        self.enter = ConvBlock(channels, widths[0])
        pairs = list(itertools.pairwise(widths))
        self.shrink = torch.nn.ModuleList(torch.nn.Conv2d(a, b, 2, stride=2) for a, b in pairs)
        self.down = torch.nn.ModuleList(ConvBlock(b, b) for _, b in pairs)
        self.grow = torch.nn.ModuleList(torch.nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.up = torch.nn.ModuleList(ConvBlock(2 * a, a) for a, _ in reversed(pairs))
        self.head = torch.nn.Conv2d(widths[0], classes, 1)
        for layer in self.modules():
            if isinstance(layer, torch.nn.Conv2d | torch.nn.ConvTranspose2d):  # the default shrinks signals by layer
                torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                torch.nn.init.zeros_(layer.bias)

    def forward(self, pixels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, classes, height, width) of `pixels` (rows, channels, height, width).

        `mask` (rows, 1, height, width) is 1 for real pixels. Height and width are multiples of 2^(levels − 1)."""
        masks = [mask.to(pixels.dtype)]
        x = self.enter(pixels * masks[0], masks[0])
        skipped = []
        for shrink, block in zip(self.shrink, self.down, strict=True):
            skipped.append(x)
            masks.append(F.max_pool2d(masks[-1], 2))  # a cell is real if one of its pixels is
            x = block(shrink(x) * masks[-1], masks[-1])
        for grow, block in zip(self.grow, self.up, strict=True):
            masks.pop()
            x = block(torch.cat([grow(x) * masks[-1], skipped.pop()], 1), masks[-1])
        return self.head(x)
