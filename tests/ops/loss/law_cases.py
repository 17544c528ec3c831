"""The unreduced loss as a loop body, for the law suites. The other reductions are held to the laws in test_loss.py."""

import torch
import torch.nn.functional as F

import maskwise as mw
from tests.laws.slices import Law

NAMES = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits", "kl_div")


def target_of(x):
    """A target that depends on the place in the row alone."""
    ramp = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
    return (ramp / 64 + 0.1).expand(x.shape)


def call(x, mask, name):
    return mw.loss(getattr(F, name), x, target_of(x), mask, reduction="none")


def body(row, keep, name):
    clean = torch.where(keep, row, 0.0)
    return torch.where(keep, getattr(F, name)(clean, target_of(clean), reduction="none"), 0.0)


CALLS = {"loss": call}
LAWS = {"loss": Law("elementwise", 0.0, 2, body)}
KWARGS = {"loss": [{"name": name} for name in NAMES]}
