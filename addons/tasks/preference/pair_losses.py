"""Losses of preference pairs by name: functions of the scores of both completions of a pair.

Tests: tests/addons/tasks/test_preference.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class PairLoss(NamedTuple):
    """A loss of pairs, and what it needs of them."""

    # (scores of the chosen completions, of the rejected ones, options of the task) -> losses, all of shape (rows,)
    of_scores: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
    has_reference: bool = True  # a score is a log-ratio to the reference, else a log-probability
    by_token: bool = False  # a score is divided by the tokens of its completion
    of_difference: bool = True  # it depends on nothing but chosen − rejected, so tokens that both begin with cancel
    nll_weight: float = 0.0  # default of the option

    @property
    def needs_all_tokens(self) -> bool:
        """Return whether the tokens that both completions begin with matter."""
        return self.by_token or not self.of_difference


def sigmoid(chosen: torch.Tensor, rejected: torch.Tensor, o: Any) -> torch.Tensor:
    """Return −log σ(beta · difference), with `label_smoothing` also of pairs the wrong way round (cDPO)."""
    return _smoothed(o.beta * (chosen - rejected), o)


def robust(chosen: torch.Tensor, rejected: torch.Tensor, o: Any) -> torch.Tensor:
    """Return the loss of DPO that is unbiased if `label_smoothing` of the pairs are the wrong way round."""
    margin = o.beta * (chosen - rejected)
    clean = (1 - o.label_smoothing) * F.logsigmoid(margin)
    flipped = o.label_smoothing * F.logsigmoid(-margin)
    return (flipped - clean) / (1 - 2 * o.label_smoothing)


def ipo(chosen: torch.Tensor, rejected: torch.Tensor, o: Any) -> torch.Tensor:
    """Return (difference − 1 / (2 beta))²."""
    return (chosen - rejected - 1 / (2 * o.beta)) ** 2


def hinge(chosen: torch.Tensor, rejected: torch.Tensor, o: Any) -> torch.Tensor:
    """Return max(0, 1 − beta · difference)."""
    return F.relu(1 - o.beta * (chosen - rejected))


def apo_zero(chosen: torch.Tensor, rejected: torch.Tensor, o: Any) -> torch.Tensor:
    """Return 1 − σ(beta · chosen) + σ(beta · rejected)."""
    return 1 - torch.sigmoid(o.beta * chosen) + torch.sigmoid(o.beta * rejected)


def simpo(chosen: torch.Tensor, rejected: torch.Tensor, o: Any) -> torch.Tensor:
    """Return −log σ(beta · difference − simpo_gamma)."""
    return _smoothed(o.beta * (chosen - rejected) - o.simpo_gamma, o)


def odds_ratio(chosen: torch.Tensor, rejected: torch.Tensor, o: Any) -> torch.Tensor:
    """Return −beta · log σ(difference of the log-odds); scores are mean log-probabilities of tokens."""
    return -o.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _smoothed(margin: torch.Tensor, o: Any) -> torch.Tensor:
    return -(1 - o.label_smoothing) * F.logsigmoid(margin) - o.label_smoothing * F.logsigmoid(-margin)


def _log_odds(log_p: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 − p)). It is bounded: at a probability of exactly 1, the gradient would be NaN."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    return log_p - torch.log(-torch.expm1(log_p))


PAIR_LOSSES = {
    "sigmoid": PairLoss(sigmoid),
    "ipo": PairLoss(ipo),
    "hinge": PairLoss(hinge),
    "robust": PairLoss(robust),
    "sigmoid_norm": PairLoss(sigmoid, by_token=True),
    "apo_zero": PairLoss(apo_zero, of_difference=False),
    "cpo": PairLoss(sigmoid, has_reference=False, nll_weight=1.0),
    "simpo": PairLoss(simpo, has_reference=False, by_token=True),
    "orpo": PairLoss(odds_ratio, has_reference=False, by_token=True, nll_weight=1.0),
}
SMOOTHED = ("sigmoid", "robust", "sigmoid_norm", "cpo", "simpo")  # those with `label_smoothing`
