"""Weights that a draft starts from: the target's last read layer where shapes agree, near-identity projections."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...layers.draft_heads import init_markov_weights
from ...layers.params import ParamSource
from ..checkpoint import expected_tensors
from ..model_config import ModelConfig


def initial_weights(
    config: ModelConfig, source: ParamSource, generator: torch.Generator, device: torch.device
) -> dict[str, Tensor]:
    """Float32 draft weights by canonical name for the draft that ``config`` announces; all but router biases require
    gradients.

    Stage s copies the target layer it reads (a plain prediction layer: the last one): attention without its
    compressor, streams, norms, shared expert, and as many routed experts as the draft has; final norm and stream head
    are the target's. Projections of the context start as the mean of their inputs, new heads small or zero.
    """
    weights: dict[str, Tensor] = {}
    specs = {n: s for n, s in expected_tensors(config).items() if s.role == "draft" and s.copy_of is None}
    for name, spec in specs.items():
        stage, rest = name.removeprefix("mtp.").split(".", 1)
        layers = config.dspark.target_layer_ids if config.dspark is not None else (config.num_layers - 1,)
        layer = layers[min(int(stage), len(layers) - 1)]
        weights[name] = _start(rest, spec.shape, layer, config.num_experts, source, generator)
    if config.dspark is not None and config.dspark.markov_rank:
        draft, prefix = config.dspark, f"mtp.{config.num_draft_stages - 1}.markov_head."
        fresh = init_markov_weights(
            draft.markov_head_type, config.vocab_size, draft.markov_rank, config.hidden_size, generator
        )
        weights |= {prefix + name: weight for name, weight in fresh.items()}
    assert weights.keys() == specs.keys()
    return {
        name: weight.float().to(device).requires_grad_(not name.endswith("gate.bias"))
        for name, weight in weights.items()
    }


def eagle_weights(
    config: ModelConfig,
    num_experts: int,
    num_layers_read: int,
    source: ParamSource,
    generator: torch.Generator,
    device: torch.device,
) -> dict[str, Tensor]:
    """Float32 weights of an EAGLE-3 draft: a layer as in :func:`initial_weights`, with ``num_experts`` routed experts,
    ``fc`` [D, m D] over ``num_layers_read`` = m target layers and ``in_proj`` [D, 2 D] in place of the prediction
    layer's projections.
    """
    prefix, hidden = "mtp.0.", config.hidden_size
    layer = config.num_layers - 1
    sized = dataclasses.replace(
        config, num_experts=num_experts, num_experts_per_tok=min(config.num_experts_per_tok, num_experts)
    )
    weights = {}
    for name, spec in expected_tensors(sized).items():
        if spec.role == "draft" and spec.copy_of is None and not name.endswith(("e_proj.weight", "h_proj.weight")):
            weights[name] = _start(name.removeprefix(prefix), spec.shape, layer, config.num_experts, source, generator)
    weights[prefix + "fc.weight"] = _start(
        "main_proj.weight", (hidden, num_layers_read * hidden), layer, config.num_experts, source, generator
    )
    weights[prefix + "in_proj.weight"] = torch.empty(hidden, 2 * hidden).normal_(std=0.02, generator=generator)
    return {
        name: weight.float().to(device).requires_grad_(not name.endswith("gate.bias"))
        for name, weight in weights.items()
    }


def _start(
    name: str, shape: tuple[int, ...], layer: int, num_experts: int, source: ParamSource, generator: torch.Generator
) -> Tensor:
    """The first value of the tensor ``name`` below its stage; the target's ``layer`` has ``num_experts``."""
    if name == "ffn.gate.bias" or name.startswith(("confidence_head.", "markov_head.")):
        return torch.zeros(shape)
    if name in ("main_norm.weight", "enorm.weight", "hnorm.weight"):
        return torch.ones(shape)
    if name in ("main_proj.weight", "e_proj.weight", "h_proj.weight"):
        num_parts = shape[1] // shape[0]
        mean = torch.eye(shape[0]).repeat(1, num_parts) / num_parts
        return mean + torch.empty(shape).normal_(std=0.02, generator=generator)
    if name == "norm.weight" or name.startswith("hc_head_"):
        return source.take(name, dtype=torch.float32)
    original = f"layers.{layer}.{name}"
    if name == "ffn.gate.weight":
        rows = source.take(original, dtype=torch.float32)
        if shape[0] <= rows.shape[0]:
            return rows[: shape[0]].contiguous()
        return torch.empty(shape).normal_(std=float(rows.std()), generator=generator)
    if name.startswith("ffn.experts.") and int(name.split(".")[2]) >= num_experts:
        peer = source.take(f"layers.{layer}.ffn.experts.0.{name.rsplit('.', 2)[1]}.weight", dtype=torch.float32)
        return torch.empty(shape).normal_(std=float(peer.std()), generator=generator)
    return source.take(original, dtype=torch.float32)
