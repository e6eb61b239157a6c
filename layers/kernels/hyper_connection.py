"""Hyper-connections in plain torch: read one stream out of n, and write the sublayer's output back into n.

Legend: T rows, n residual streams, D hidden width. ``fn`` [n D, (2 + n) n] (input axis first), ``base``
[(2 + n) n], ``scale`` [3] are float32, in the order pre, post, comb.
Sources: Hyper-Connections (2409.19606), mHC (2512.24880).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class HyperIn(NamedTuple):
    """``x`` [T, D]: normed input of the sublayer. ``post`` float32 [T, n], ``comb`` float32 [T, n, n]: how its output
    and the old streams make the new streams."""

    x: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def sinkhorn(comb: torch.Tensor, num_iters: int, eps: float) -> torch.Tensor:
    """``comb`` [..., n, n] made nearly doubly stochastic: a softmax over rows and a column step, then
    ``num_iters - 1`` row and column steps. It ends on columns, so rows sum to one only approximately."""
    comb = comb.softmax(dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def stream_mix(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """``fn`` applied to the flattened, RMS-normalised (no weight) streams [T, n, D]; float32 [T, fn columns]."""
    flat = streams.flatten(1).float()
    return (flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)) @ fn


def weighted_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis: float32 statistics and weight, cast once at the end to ``x``'s dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def hc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
    constrained: bool,
) -> HyperIn:
    """Read the sublayer's input from ``streams`` [T, n, D].

    ``constrained`` is mHC: sigmoid for pre (plus ``hc_eps``) and post (times two), Sinkhorn for comb. Otherwise the
    unconstrained hyper-connection: all three are ``tanh(mix) * scale + base``.
    """
    num_streams = streams.shape[1]
    mix = stream_mix(streams, fn, norm_eps)
    pre, post, comb = mix.split((num_streams, num_streams, num_streams * num_streams), dim=-1)
    b_pre, b_post, b_comb = base.split((num_streams, num_streams, num_streams * num_streams))
    if constrained:
        pre = torch.sigmoid(pre * scale[0] + b_pre) + hc_eps
        post = 2 * torch.sigmoid(post * scale[1] + b_post)
        comb = sinkhorn((comb * scale[2] + b_comb).unflatten(-1, (num_streams, num_streams)), num_iters, hc_eps)
    else:
        pre = torch.tanh(pre) * scale[0] + b_pre
        post = torch.tanh(post) * scale[1] + b_post
        comb = (torch.tanh(comb) * scale[2] + b_comb).unflatten(-1, (num_streams, num_streams))
    x = torch.einsum("tn,tnd->td", pre, streams.float()).to(streams.dtype)
    return HyperIn(weighted_norm(x, norm_weight, norm_eps), post, comb)


def hc_post(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """New streams [T, n, D]: ``post_k y + sum_j comb[j, k] streams_j`` (the sum is over comb's FIRST index)."""
    mixed = torch.einsum("tjk,tjd->tkd", comb, streams.float())
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(streams.dtype)


def hc_mean(streams: torch.Tensor) -> torch.Tensor:
    """The mean [T, D] of streams [T, n, D]: what a draft reads of a layer."""
    return streams.mean(dim=1)


def hc_collapse(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, hc_eps: float, norm_eps: float
) -> torch.Tensor:
    """The head's mix of the n streams into one, [T, D], before the final norm. ``fn`` [n D, n], ``scale`` [1]."""
    pre = torch.sigmoid(stream_mix(streams, fn, norm_eps) * scale + base) + hc_eps
    return torch.einsum("tn,tnd->td", pre, streams.float()).to(streams.dtype)
