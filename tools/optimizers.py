"""The optimizers of the training tools: Muon for matrices, AdamW for everything else."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable

import torch


class Optimizers:
    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], others: Iterable[torch.nn.Parameter], rate: float, weight_decay: float
    ) -> None:
        """``rate`` is the highest learning rate, ``weight_decay`` that of matrices."""
        self._rate = rate
        both = list(matrices), list(others)
        self._parameters = [*both[0], *both[1]]
        self._optimizers = [
            torch.optim.Muon(both[0], lr=rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(both[1], lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, share: float) -> None:
        """A step at this share of the highest rate, by gradients of a norm of 1 at most, which are removed then."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def refuse_old_torch(parser: ArgumentParser) -> None:
    if not hasattr(torch.optim, "Muon"):
        parser.error(f"torch {torch.__version__} has no Muon, by which this trains: take 2.9 or newer")
