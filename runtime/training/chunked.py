"""Sums over many rows of logits without ever holding all of them, their gradients included.

A vocabulary of logits for every place of every block is the largest thing in draft training. Rows are taken a few at a
time instead: their logits, their share of the sum and its gradients are computed while they are in the cache, and only
the gradients of the (much narrower) inputs are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

RowSums = Callable[..., tuple[Tensor, ...]]
"""``sums(*rows, *shared)`` of a slice of rows: scalars, of which the first is differentiated."""


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums: RowSums, num_rows_inputs: int, size: int, *inputs: Tensor | None):
        wanted = [x is not None and x.requires_grad for x in inputs]
        grads = [torch.zeros_like(x) if want else None for x, want in zip(inputs, wanted)]
        leaves = [x.detach().requires_grad_() if want else x for x, want in zip(inputs, wanted)]
        totals: list[Tensor] | None = None
        for start in range(0, len(inputs[0]), size):
            part = slice(start, start + size)
            cut = [x if x is None else x[part] for x in inputs[:num_rows_inputs]]
            cut = [x.detach().requires_grad_() if want else x for x, want in zip(cut, wanted)]
            used = (*cut, *leaves[num_rows_inputs:])
            with torch.enable_grad():
                found = sums(*used)
                sources = [x for x, want in zip(used, wanted) if want]
                slopes = iter(torch.autograd.grad(found[0], sources, allow_unused=True) if sources else ())
            for index, grad in enumerate(grads):
                slope = next(slopes) if grad is not None else None
                if slope is not None:
                    (grad[part] if index < num_rows_inputs else grad).add_(slope)
            found = [value.detach() for value in found]
            totals = found if totals is None else [a + b for a, b in zip(totals, found)]
        ctx.save_for_backward(*(grad for grad in grads if grad is not None))
        ctx.wanted = wanted
        ctx.mark_non_differentiable(*totals[1:])
        return tuple(totals)

    @staticmethod
    def backward(ctx, upstream: Tensor, *others: Tensor):
        saved = iter(ctx.saved_tensors)
        return (None, None, None, *(upstream * next(saved) if want else None for want in ctx.wanted))


def chunked_sums(
    sums: RowSums, rows: Sequence[Tensor | None], shared: Sequence[Tensor | None], size: int = 256
) -> tuple[Tensor, ...]:
    """``sums(*rows, *shared)``, added up over slices of ``size`` of the ``rows`` inputs (each [R, ..] or ``None``).

    The first sum is differentiable in every input that requires gradients; the others are constants. ``sums`` must give
    sums over rows, so that slices add up. R may be 0, which gives what ``sums`` makes of no rows.
    """
    if len(rows[0]) == 0:
        return sums(*rows, *shared)
    return _Chunked.apply(sums, len(rows), size, *rows, *shared)
