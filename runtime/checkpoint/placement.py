"""How many bytes of weights each rank of a layout holds, from names and shapes alone.

Replicated over the tensor ranks of a stage: norms, residual mixes, query and key down-projections, compressors, the
indexer, routers. Cut over attn_tp: query up-projection, sinks, output projections. Routed experts: whole over ep, by
width over moe_tp; the shared expert by width over tp. Embedding and head: by vocabulary over attn_tp, since
data-parallel ranks have different tokens. A draft is laid out like a layer, on the ranks of the last pipeline stage.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...layers.embedding import vocab_shard
from ...parallel.pipeline import stage_layers
from ...parallel.topology import Topology
from ..model_config import ModelConfig
from .spec import TensorSpec, expected_tensors

_BY_HEAD = ("attn.wq_b.weight", "attn.attn_sink", "attn.wo_a.weight", "attn.wo_b.weight")
_BY_VOCABULARY = ("embed.weight", "head.weight")


class RankWeights(NamedTuple):
    """Bytes of weights on one rank, of the target and of the draft."""

    target: int
    draft: int


def layout_problems(config: ModelConfig, topology: Topology) -> list[str]:
    """What keeps ``config`` from being cut like ``topology`` (whose own rules already hold): both numbers each."""
    draft_experts = config.dspark.num_routed_experts if config.dspark is not None else config.num_experts
    demands = (
        ("num_attention_heads", config.num_heads, "attn_tp", topology.attn_tp),
        ("o_groups", config.o_groups, "attn_tp", topology.attn_tp),
        ("n_routed_experts", config.num_experts, "ep", topology.ep),
        ("the draft's routed experts", draft_experts, "ep", topology.ep),
        ("moe_intermediate_size", config.moe_intermediate_size, "moe_tp", topology.moe_tp),
        ("moe_intermediate_size of the shared expert", config.moe_intermediate_size, "tp", topology.tp),
    )
    problems = [
        f"{what} = {size} is not divisible by {axis} = {ranks}" for what, size, axis, ranks in demands if size % ranks
    ]
    if topology.pp > config.num_layers:
        problems.append(f"pp = {topology.pp} exceeds the {config.num_layers} layers")
    return problems


def check_layout(config: ModelConfig, topology: Topology) -> None:
    """Raise ``ValueError`` with the first of :func:`layout_problems`, if there are any."""
    for problem in layout_problems(config, topology):
        raise ValueError(f"the layout does not fit the model: {problem}")


def rank_weights(config: ModelConfig, topology: Topology, itemsize: int, *, with_draft: bool) -> list[RankWeights]:
    """Bytes of weights of every world rank, when floats are computed with in ``itemsize`` bytes.

    What the layers keep in float32 whatever the type (norms, residual mixes, routers, sinks) counts four bytes, expert
    tables eight. Raises ``ValueError`` when the layout does not fit the model.
    """
    problems = layout_problems(config, topology)
    if problems:
        raise ValueError("; ".join(problems))
    stages = stage_layers(config.num_layers, topology.pp)
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    last = topology.pp - 1
    # Bytes by (stage, role), already divided by the ranks that share them evenly.
    even = {(stage, role): 0 for stage in range(topology.pp) for role in ("target", "draft")}
    for name, spec in expected_tensors(config, with_draft=with_draft).items():
        if spec.copy_of is not None or name in _BY_VOCABULARY:
            continue
        stage = stage_of[int(name.split(".")[1])] if name.startswith("layers.") else last
        even[stage, spec.role] += stored_bytes(name, spec, itemsize) // _shares(name, topology)
    result = []
    for rank in range(topology.world):
        coords = topology.coords(rank)
        stage = coords.pp
        shard = vocab_shard(config.vocab_size, topology.attn_tp, coords.attn_tp)
        rows = (shard.stop - shard.start) * config.hidden_size * itemsize
        tables = (stage == 0) + (stage == last)
        result.append(RankWeights(even[stage, "target"] + tables * rows, even[stage, "draft"]))
    return result


def stored_bytes(name: str, spec: TensorSpec, itemsize: int) -> int:
    """Bytes of a whole tensor in memory."""
    if spec.kind == "table":
        itemsize = 8
    elif spec.kind == "plain" and name not in _BY_VOCABULARY and "markov_head" not in name:
        itemsize = 4
    return math.prod(spec.shape) * itemsize


def _shares(name: str, topology: Topology) -> int:
    if ".ffn.experts." in name:
        return topology.ep * topology.moe_tp
    if ".ffn.shared_experts." in name:
        return topology.tp
    if name.endswith(_BY_HEAD) and ".indexer." not in name:
        return topology.attn_tp
    return 1
