"""Contrastive loss over pairs of vectors (InfoNCE), and retrieval metrics in bounded memory.

Tests: tests/addons/tasks/test_embeddings.py.
"""

import torch
import torch.nn.functional as F

CHUNK_ELEMENTS = 1 << 24  # similarities that exist at once in `retrieval_metrics`
TIE = 1e-5  # cosine similarities closer than this are equal: two rows may have the same text


def info_nce(anchors: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the sum over rows of the mean of two cross-entropies: positive given anchor, and anchor given positive.

    `anchors` is (rows, features), `others` (rows, 1 or more, features): a row's positive, then its negatives. The
    logits are dot products. An anchor's negatives are all others of all rows. Oord et al., "Representation Learning
    with Contrastive Predictive Coding", 2018; in both directions: Radford et al., 2021 (CLIP)."""
    own = torch.arange(len(anchors), device=anchors.device)
    logits = anchors @ others.transpose(0, 1).flatten(0, 1).T  # all positives, then all negatives
    loss = F.cross_entropy(logits, own, reduction="sum")
    return (loss + F.cross_entropy(logits[:, : len(own)].T, own, reduction="sum")) / 2


def retrieval_metrics(anchors: torch.Tensor, others: torch.Tensor) -> dict[str, float]:
    """Return recall at 1 and 10 and mean reciprocal rank of each anchor's positive among the others of all rows.

    Takes the shapes of `info_nce`, in O(rows²) time. Others that are as similar as the positive do not count."""
    candidates, ranks = others.flatten(0, 1), []
    size = max(1, CHUNK_ELEMENTS // len(candidates))
    for part, positives in zip(anchors.split(size), others[:, 0].split(size), strict=True):
        own = (part * positives).sum(-1, keepdim=True) + TIE * part.norm(dim=-1, keepdim=True)
        ranks.append(1 + (part @ candidates.T > own).sum(1))
    found = torch.cat(ranks).double()
    recall = {f"recall_at_{k}": (found <= k).double().mean().item() for k in (1, 10)}
    return recall | {"mrr": (1 / found).mean().item()}
