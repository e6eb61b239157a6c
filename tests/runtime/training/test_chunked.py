"""Sums in slices of rows equal the whole sum, gradients included."""

import pytest
import torch
from dspark.runtime.training.chunked import chunked_sums


def sums(x, y, unused, w):
    product = torch.tanh(x @ w) * y
    return product.square().sum(), product.sum()


@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_slices_add_up_and_so_do_their_gradients(size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 4, generator=generator, dtype=torch.float64).requires_grad_()
    w = torch.randn(4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    y = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    whole = sums(x, y, None, w)
    wanted = torch.autograd.grad(3.0 * whole[0], (x, w))
    parts = chunked_sums(sums, (x, y, None), (w,), size)
    assert not parts[1].requires_grad
    torch.testing.assert_close(torch.stack(parts), torch.stack(whole))
    for mine, reference in zip(torch.autograd.grad(3.0 * parts[0], (x, w)), wanted):
        torch.testing.assert_close(mine, reference)


def test_no_rows():
    w = torch.randn(4, 5).requires_grad_()
    total, other = chunked_sums(sums, (torch.empty(0, 4), torch.empty(0, 5), None), (w,))
    assert total.item() == other.item() == 0.0 and total.requires_grad
