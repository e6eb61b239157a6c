"""Bytes that a forward hands to its collectives on every axis, counted and from the formulas of docs/layouts.md.

Examples:
  dspark bench traffic --tp 4 --dp 2 --tokens 64
  dspark bench traffic --tp 4 --cp 2 --pp 2 --tokens 64 --json

Ranks are forked on this host. Every DP rank runs one step of prefill and one of decoding. A line is one operation on a
group, seen from rank 0: calls, payload bytes as counted, and as the formula says. Exit status 1 if any two differ.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any, NamedTuple

import torch

from ...comm.dp_attention import Padding, choose_padding, round_up
from ...comm.pipeline import StageLink
from ...layers.embedding import vocab_shard
from ...layers.kernels import Kernels
from ...parallel.groups import Groups
from ...parallel.local import run_forked
from ...parallel.pipeline import stage_layers
from ...parallel.topology import Topology
from ..agreement import Agreement, split_rows
from ..checkpoint import RandomWeights, bundled_model
from ..cli import EXIT_FAILED, EXIT_OK, running
from ..engine_config import EngineConfig
from ..load import make_cache
from ..model_config import ModelConfig, load_model_config, only_for
from ..models.deepseek_v4 import DeepseekV4, attention_sizes
from ..step import Span, Step, build_step
from ..verbs.layout import add_layout_flags, topology_from_args
from . import flags
from .table import table

ITEM = 4  # bytes of a float32

Bytes = dict[tuple[str, str], int]
"""Payload bytes by (group name, operation)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the bundled small model)")
    parser.add_argument("--tokens", type=flags.at_least_one, default=64, metavar="N", help="prompt tokens a DP rank")
    parser.add_argument("--requests", type=flags.at_least_one, default=3, metavar="N", help="decoding, a DP rank")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_layout_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Count and compare; 1 if a formula is wrong."""
    config = load_model_config(args.model or bundled_model())
    only_for(config, "deepseek_v4", "bench traffic")
    world = (args.tp or (args.dp * args.cp)) * args.pp
    topology = topology_from_args(args, world, world)
    torch.set_num_threads(1)
    with running():
        found = run_forked(lambda rank: count(config, topology, rank, args.cp_split, args.tokens, args.requests), world)
    same = all(row[3] == row[4] for rank in found for row in rank)
    if args.json:
        names = ("step", "group", "operation", "bytes", "formula_bytes")
        print(json.dumps({"same": same, "ranks": [[dict(zip(names, row)) for row in rank] for rank in found]}))
    else:
        rows = [[step, group, op, str(counted), str(formula)] for step, group, op, counted, formula in found[0]]
        print(table(["step", "group", "operation", "bytes", "formula"], rows))
        print("all ranks agree with the formulas" if same else "SOME RANKS DIFFER FROM THE FORMULAS")
    return EXIT_OK if same else EXIT_FAILED


def count(
    config: ModelConfig, topology: Topology, rank: int, cp_split: str, num_tokens: int, num_requests: int
) -> list[list[Any]]:
    """Rows (step, group, operation, bytes counted, bytes by formula) of this rank. Collective over the job."""
    groups = Groups.build(topology, rank) if topology.world > 1 else Groups.single()
    device = torch.device("cpu")
    max_context = min(num_tokens + 2, config.max_position_embeddings)
    model = DeepseekV4(config, RandomWeights(config, seed=0), groups, Kernels("torch"), max_context, device)
    options = EngineConfig(dtype="float32", max_running=num_requests, max_context=max_context)
    cache = make_cache(config, options, device, pipeline=groups.pp)
    slots = [cache.acquire() for _ in range(num_requests)]
    for slot in slots:
        cache.reserve(slot, max_context)
    link, rows = StageLink(groups.pp), []
    prompt = [token % config.vocab_size for token in range(num_tokens)]
    steps = {
        "prefill": [Span(slots[0], 0, prompt, 1)],
        "decode": [Span(slot, num_tokens, [1], 1) for slot in slots],
    }
    for name, spans in steps.items():
        lengths = [len(span.tokens) for span in spans]
        split = split_rows(lengths, cp_split, groups, replicate=False)
        local = sum(lengths) if split is None else len(split.owned[split.group.rank])
        (shapes,) = Agreement(groups, device).shapes([local], len(spans), name == "prefill")
        sizes = {"split": split, "counts": shapes.rows, "has_prefill": shapes.has_prefill}
        step = build_step(spans, cache.page_table, cache.layout.ratios, config.vocab_size, **sizes)
        groups.reset_traffic()
        model.run_stage([step], cache, link)
        link.flush()
        counted = {(g.name, op): t.bytes for g in groups for op, t in g.traffic.ops.items()}
        formula = forward_bytes(config, groups, step, split is not None)
        keys = sorted(counted.keys() | formula.keys())
        rows += [[name, *key, counted.get(key, 0), formula.get(key, 0)] for key in keys]
    return rows


def forward_bytes(config: ModelConfig, groups: Groups, step: Step, is_split: bool) -> Bytes:
    """The formulas of docs/layouts.md for one forward of ``step`` on this rank, without a draft."""
    topology, stage = groups.topology, groups.pp.rank
    layers = stage_layers(config.num_layers, topology.pp)[stage]
    is_first, is_last = stage == 0, stage == topology.pp - 1
    here, wide = step.tokens.shape[0], config.hidden_size * ITEM
    total: Counter[tuple[str, str]] = Counter()

    def add(axis: str, operation: str, num_bytes: int) -> None:
        group = getattr(groups, axis)
        if group.size > 1:
            total[group.name, operation] += num_bytes

    owners = _owner_rows(step, groups)
    # A row goes to the experts with its routing: ids and weights, and one number more.
    routed = wide + 8 * config.num_experts_per_tok + 4
    if is_first:
        add("attn_tp", "all_reduce", here * wide)
    for layer in layers:
        sizes = attention_sizes(config, layer)
        if is_split:
            add("attn_cp", "all_gather_v", here * sizes.head_dim * ITEM)
            if sizes.ratio:
                add("attn_cp", "all_gather_v", here * sizes.raw_width * ITEM)
        add("attn_tp", "all_reduce", here * wide)
        if owners.padded:
            add("moe_rows", "all_gather", owners.longest * routed)
            add("moe_block", "reduce_scatter", owners.all * wide)
            add("attn_tp", "all_gather", owners.longest // topology.attn_tp * wide)
        else:
            add("moe_rows", "all_gather_v", here * routed)
            add("moe_block", "all_reduce", owners.all * wide)
    if is_last:
        num_here = here if step.logit_rows is None else step.logit_rows.shape[0]
        if is_split:
            add("attn_cp", "all_gather_v", num_here * wide)
        shard = vocab_shard(config.vocab_size, topology.attn_tp, groups.attn_tp.rank)
        add("attn_tp", "all_gather", step.num_logits * shard.size * ITEM)
    else:
        add("pp", "send", here * config.hc_mult * wide)
    return dict(total)


class _OwnerRows(NamedTuple):
    """Rows of the longest owner and of all owners, with padding, if there is any."""

    padded: bool
    longest: int
    all: int


def _owner_rows(step: Step, groups: Groups) -> _OwnerRows:
    first = groups.attn_rows.rank - groups.moe_rows.rank
    counts = step.counts[first : first + groups.moe_rows.size]
    padded = len(counts) > 1 and choose_padding(counts, step.has_prefill) is Padding.MAX_LEN
    longest = round_up(max(counts), groups.topology.attn_tp)
    return _OwnerRows(padded, longest, longest * len(counts) if padded else sum(counts))
