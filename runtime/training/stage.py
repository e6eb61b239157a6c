"""One V4 layer of a draft as a differentiable function of named weights, over many blocks at once.

Legend: A blocks, b rows a block, R = A b rows, K keys in reach of a block, n residual streams, D hidden width, d head
width, E experts, k experts per row.

The weights are those of the checkpoint, by their names below the stage (``attn.wq_a.weight`` [out, in], ...), so what
is trained is what is written. The operations are the plain functions that inference uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ...layers.kernels.hyper_connection import hc_collapse, stream_mix, weighted_norm
from ...layers.kernels.moe import Routing, route_scored
from ...layers.rope import RopeTable, rotate
from ..model_config import ModelConfig

Weights = Mapping[str, Tensor]


class StageSizes(NamedTuple):
    """The target's config, with the experts that the draft has of its own."""

    config: ModelConfig
    num_experts: int
    top_k: int


class Keys(NamedTuple):
    """What the rows of each block attend to: ``keys`` [A, K, d], rotated at their own positions, and ``visible`` bool
    [A, b, K]. Keys are also the values."""

    keys: Tensor
    visible: Tensor


SeenBy = Callable[[Tensor], Keys]
"""``seen(own)``: the keys in reach, given the blocks' own keys [A, b, d]."""


class StageOutput(NamedTuple):
    """``streams`` [R, n, D]; ``load`` [E]: how many rows chose each expert."""

    streams: Tensor
    load: Tensor


def scoped(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The weights below ``prefix``, by the rest of their names."""
    return {name[len(prefix) :]: weight for name, weight in weights.items() if name.startswith(prefix)}


def context_keys(weights: Weights, context: Tensor, positions: Tensor, rope: RopeTable, eps: float) -> Tensor:
    """Keys [T, d] of context rows [T, D]: projected, normed, rotated; neither layer norm nor streams come first."""
    keys = weighted_norm(linear(context, weights["attn.wkv.weight"]), weights["attn.kv_norm.weight"], eps)
    return rotate(keys, rope.cos[positions], rope.sin[positions])


def attention(
    weights: Weights, x: Tensor, seen: SeenBy, positions: Tensor, rope: RopeTable, config: ModelConfig
) -> Tensor:
    """Attention of the blocks' rows, [R, D]; ``x`` [R, D] normed rows at ``positions`` [A, b]."""
    num_blocks, width = positions.shape
    heads, head_dim, eps = config.num_heads, config.head_dim, config.rms_norm_eps
    cos, sin = rope.cos[positions.flatten()], rope.sin[positions.flatten()]
    latent = weighted_norm(linear(x, weights["attn.wq_a.weight"]), weights["attn.q_norm.weight"], eps)
    q = linear(latent, weights["attn.wq_b.weight"]).unflatten(-1, (heads, head_dim)).float()
    q = rotate(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps), cos.unsqueeze(1), sin.unsqueeze(1))
    own = weighted_norm(linear(x, weights["attn.wkv.weight"]), weights["attn.kv_norm.weight"], eps)
    keys, visible = seen(rotate(own, cos, sin).view(num_blocks, width, head_dim))
    keys = keys.float()
    logits = q.view(num_blocks, width * heads, head_dim) @ (keys * head_dim**-0.5).transpose(1, 2)
    logits = logits.view(num_blocks, width, heads, keys.shape[1]).masked_fill(~visible.unsqueeze(2), float("-inf"))
    sink = weights["attn.attn_sink"].view(1, 1, -1, 1).expand(num_blocks, width, -1, -1)
    probs = torch.cat((logits, sink), dim=-1).softmax(dim=-1)[..., :-1]
    o = (probs.reshape(num_blocks, width * heads, keys.shape[1]) @ keys).view(-1, heads, head_dim)
    o = rotate(o, cos.unsqueeze(1), sin.unsqueeze(1), inverse=True).to(x.dtype)
    groups = config.o_groups
    wo_a = weights["attn.wo_a.weight"].unflatten(0, (groups, config.o_lora_rank))
    low = torch.bmm(o.reshape(-1, groups, heads // groups * head_dim).transpose(0, 1), wo_a.transpose(1, 2))
    return linear(low.transpose(0, 1).flatten(1), weights["attn.wo_b.weight"])


def expert(x: Tensor, weights: Weights, prefix: str, limit: float | None) -> Tensor:
    """One gated expert on rows ``x`` [.., D]."""
    gate, up = linear(x, weights[f"{prefix}.w1.weight"]), linear(x, weights[f"{prefix}.w3.weight"])
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return linear(silu(gate) * up, weights[f"{prefix}.w2.weight"])


def route(weights: Weights, x: Tensor, sizes: StageSizes) -> Routing:
    """Scored routing of rows ``x`` [R, D]."""
    config = sizes.config
    logits = linear(x.float(), weights["ffn.gate.weight"].float())
    return route_scored(
        logits,
        weights["ffn.gate.bias"],
        sizes.top_k,
        config.scoring_func,
        config.norm_topk_prob,
        config.routed_scaling_factor,
    )


def moe(weights: Weights, x: Tensor, sizes: StageSizes) -> tuple[Tensor, Tensor]:
    """Routed and shared experts on rows ``x`` [R, D]: the sum [R, D], and the load [E].

    Rows are sorted by expert, so that each expert is one product over its rows.
    """
    routing, limit = route(weights, x, sizes), sizes.config.swiglu_limit
    flat = routing.experts.flatten()
    order = flat.argsort(stable=True)
    load = torch.bincount(flat, minlength=sizes.num_experts)
    parts = []
    for index, picks in enumerate(order.split(load.tolist())):
        if len(picks):
            rows = x.index_select(0, picks // sizes.top_k)
            parts.append(expert(rows, weights, f"ffn.experts.{index}", limit))
    shared = expert(x, weights, "ffn.shared_experts", limit)
    if not parts:
        return shared, load
    # Back to [R, k, D] by the inverse permutation: a gather, whose gradient is another gather.
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    each = torch.cat(parts)[back].unflatten(0, (-1, sizes.top_k)).float()
    return (each * routing.weights.unsqueeze(-1)).sum(1).to(x.dtype) + shared, load


def sinkhorn_by_rows(comb: Tensor, num_iters: int, eps: float) -> Tensor:
    """:func:`~dspark.layers.kernels.hyper_connection.sinkhorn` of ``comb`` [n, n, R]."""
    comb = comb.softmax(dim=1) + eps
    comb = comb / (comb.sum(dim=0, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        comb = comb / (comb.sum(dim=1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=0, keepdim=True) + eps)
    return comb


class StreamMix(NamedTuple):
    """``x`` [R, D] a sublayer's normed input; ``post`` [R, n] and ``comb`` [R, n, n] bring its output back."""

    x: Tensor
    post: Tensor
    comb: Tensor


def read_streams(weights: Weights, sublayer: str, streams: Tensor, config: ModelConfig) -> StreamMix:
    """:func:`hc_pre` of the mHC kind, arranged for gradients on the CPU: sums over streams are elementwise products
    instead of batched products of tiny matrices, and rows are the innermost axis of the Sinkhorn steps."""
    n, eps = config.hc_mult, config.hc_eps
    scale, base = weights[f"hc_{sublayer}_scale"], weights[f"hc_{sublayer}_base"]
    mix = stream_mix(streams, weights[f"hc_{sublayer}_fn"].T, config.rms_norm_eps)
    pre, post, comb = mix.split((n, n, n * n), dim=-1)
    b_pre, b_post, b_comb = base.split((n, n, n * n))
    pre = torch.sigmoid(pre * scale[0] + b_pre) + eps
    post = 2 * torch.sigmoid(post * scale[1] + b_post)
    comb = (comb.T.contiguous() * scale[2] + b_comb.unsqueeze(1)).view(n, n, -1)
    comb = sinkhorn_by_rows(comb, config.hc_sinkhorn_iters, eps).permute(2, 0, 1)
    x = (pre.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)
    return StreamMix(weighted_norm(x, weights[f"{sublayer}_norm.weight"], config.rms_norm_eps), post, comb)


def write_streams(streams: Tensor, y: Tensor, mix: StreamMix) -> Tensor:
    """:func:`hc_post`, written like :func:`read_streams`."""
    new = mix.post.unsqueeze(-1) * y.float().unsqueeze(1)
    for j, stream in enumerate(streams.float().unbind(1)):
        new = new + mix.comb[:, j].unsqueeze(-1) * stream.unsqueeze(1)
    return new.to(streams.dtype)


def stage_forward(
    weights: Weights,
    streams: Tensor,
    seen: SeenBy,
    positions: Tensor,
    rope: RopeTable,
    sizes: StageSizes,
) -> StageOutput:
    """The layer on ``streams`` [R, n, D]; arguments as in :func:`attention`."""
    config = sizes.config
    mix = read_streams(weights, "attn", streams, config)
    y = attention(weights, mix.x, seen, positions, rope, config)
    streams = write_streams(streams, y, mix)
    mix = read_streams(weights, "ffn", streams, config)
    y, load = moe(weights, mix.x, sizes)
    return StageOutput(write_streams(streams, y, mix), load)


def collapse(weights: Weights, streams: Tensor, config: ModelConfig) -> Tensor:
    """The head's mix of the streams [R, n, D] into one, [R, D], before the final norm."""
    return hc_collapse(
        streams,
        fn=weights["hc_head_fn"].T,
        base=weights["hc_head_base"],
        scale=weights["hc_head_scale"],
        hc_eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
    )
