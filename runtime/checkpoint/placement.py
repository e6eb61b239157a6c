"""How many bytes of weights each rank of a layout holds, from names and shapes alone.

Replicated over the tensor ranks of a stage: norms, residual mixes, query and key down-projections, compressors, the
indexer, routers. Cut over attn_tp: query up-projection, projections per head, sinks, output projections, dense
feed-forward layers. Routed experts: whole over ep, by width over moe_tp; the shared expert by width over the ranks of
one moe_dp block, or not at all where rows travel to their experts. Embedding and head: by vocabulary over attn_tp,
since data-parallel ranks have different tokens. A draft is laid out like a layer, on the ranks of the last pipeline
stage.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...layers.embedding import vocab_shard
from ...parallel.pipeline import stage_layers
from ...parallel.topology import Topology
from ..model_config import Config
from ..models import family
from ..models.demands import expert_demand, indivisible
from .spec import TensorSpec, expected_tensors

_BY_HEAD = ("attn_sink", *(f"{name}.weight" for name in ("wq_b", "wo_a", "wo_b", "q_proj", "o_proj", "kv_b_proj")))
_BY_KEY_HEAD = ("attn.k_proj.weight", "attn.v_proj.weight")
_BY_WIDTH = tuple(f"ffn.{name}_proj.weight" for name in ("gate", "up", "down"))
_BY_VOCABULARY = ("embed.weight", "head.weight")


class RankWeights(NamedTuple):
    """Bytes of weights on one rank, of the target and of the draft."""

    target: int
    draft: int


def layout_problems(
    config: Config,
    topology: Topology,
    all_to_all: bool = False,
    with_draft: bool = True,
    redundant: tuple[int, int] = (0, 0),
) -> list[str]:
    """What keeps ``config`` from being cut like ``topology`` (whose own rules already hold): both numbers each.

    ``all_to_all``: whether rows travel to their experts. ``with_draft``: whether the draft that it may bring is used.
    ``redundant``: slots beyond one per expert, of the target and of the draft.
    """
    problems = family(config.model_type).problems(config, topology, all_to_all, redundant[0])
    if with_draft and config.dspark is not None:
        experts = expert_demand("the draft's routed experts", config.dspark.num_routed_experts, redundant[1], topology)
        problems += indivisible([experts])
    if topology.pp > config.num_layers:
        problems.append(f"pp = {topology.pp} exceeds the {config.num_layers} layers")
    return problems


def check_layout(
    config: Config, topology: Topology, all_to_all: bool, with_draft: bool, redundant: tuple[int, int] = (0, 0)
) -> None:
    """Raise ``ValueError`` with the first of :func:`layout_problems`, if there are any."""
    for problem in layout_problems(config, topology, all_to_all, with_draft, redundant):
        raise ValueError(f"the layout does not fit the model: {problem}")


def rank_weights(
    config: Config, topology: Topology, itemsize: int, *, with_draft: bool, all_to_all: bool = False
) -> list[RankWeights]:
    """Bytes of weights of every world rank, when floats are computed with in ``itemsize`` bytes.

    What the layers keep in float32 whatever the type (norms, residual mixes, routers, sinks) counts four bytes, expert
    tables eight. Raises ``ValueError`` when the layout does not fit the model.
    """
    problems = layout_problems(config, topology, all_to_all)
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
        shares = _shares(name, topology, config.num_key_heads, all_to_all)
        even[stage, spec.role] += stored_bytes(name, spec, itemsize) // shares
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


def _shares(name: str, topology: Topology, num_key_heads: int, all_to_all: bool) -> int:
    if ".ffn.experts." in name:
        return topology.ep * topology.moe_tp
    if ".ffn.shared_experts." in name:
        return 1 if all_to_all else topology.tp // topology.moe_dp
    if name.endswith(_BY_WIDTH) or (".attn." in name and name.endswith(_BY_HEAD) and ".indexer." not in name):
        return topology.attn_tp
    if name.endswith(_BY_KEY_HEAD):
        return min(topology.attn_tp, num_key_heads)
    return 1
