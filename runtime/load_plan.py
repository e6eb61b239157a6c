"""What an engine will be, from its options and the configs alone: all that can be refused before a weight is read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..comm.dispatch import DispatchOptions, dispatcher_class
from ..layers.kernels import Kernels, choose
from ..parallel.topology import Topology
from .balance import ExpertPlacements, expert_placements
from .draft import DRAFTERS, Drafter, draft_config, drafter_class
from .draft.files import DraftFiles
from .draft.growth import TreeShape
from .engine_config import EngineConfig
from .model_config import Config, only_for
from .models import family

WHOLE_LABELS = ("mha", "gqa", "mqa", "mla")
"""Attention kinds that see every position."""


class LoadPlan(NamedTuple):
    """``settings`` are what the ``draft`` reads its own from, ``taps`` the layers it reads; ``max_verify``: rows of
    a request that may follow one another in the widest step; ``tree``: of which a path has that length."""

    draft: type[Drafter]
    settings: Config | DraftFiles
    taps: tuple[int, ...]
    max_verify: int
    tree: TreeShape | None
    kernels: Kernels
    dispatch: DispatchOptions
    placements: ExpertPlacements


def plan_load(config: EngineConfig, model_config: Config, topology: Topology, device: torch.device) -> LoadPlan:
    """The plan of a resolved ``config`` on ``topology``, whose nodes may not be known yet.

    Raises ``ValueError`` or ``OSError`` for options, maps and draft folders that cannot be used together.
    """
    if config.deterministic:
        only_for(model_config, "deepseek_v4", "--deterministic")
    if config.kv_format != "native":
        only_for(model_config, "deepseek_v4", f"--kv-format {config.kv_format}")
    if config.cp_keys == "ring":
        check_whole(model_config, "--cp-keys ring", "use --cp-keys gather")
    if not model_config.num_experts:
        check_no_experts(config, model_config.model_type)
    dtype, draft = getattr(torch, config.dtype), drafter_class(config.draft)
    kernels = choose(device, dtype, config.deterministic, config.kernels, config.formats)
    settings = draft_config(config.draft, model_config, config.draft_model)
    if config.prefix_cache and not draft.resumes:
        raise ValueError(f"--prefix-cache stores nothing of the draft {config.draft}; take another draft")
    taps = draft.tap_layers(settings)  # refuses what the draft is not for
    max_verify = 1 + draft.block_length(settings, config.gamma)
    if max_verify > 1 and not draft.has_confidence(settings):
        check_untrimmed(config)
    tree = tree_shape(config, model_config, draft, max_verify - 1)
    num_verified, num_drafted = max_verify, 1 + draft.max_gamma(settings)
    if tree is not None:
        num_verified, num_drafted = 1 + tree.num_drafts, max(tree.top_k, num_drafted)
    dispatch = dispatch_options(config, topology, num_verified, num_drafted)
    placements = expert_placements(config, model_config, topology, max_verify > 1)
    return LoadPlan(draft, settings, taps, max_verify, tree, kernels, dispatch, placements)


def dispatch_options(config: EngineConfig, topology: Topology, verified: int, drafted: int) -> DispatchOptions:
    """How rows reach experts. ``verified`` and ``drafted``: rows of a request at most, in the target and in the draft.

    Raises ``ValueError`` if a step may have more rows on a rank than ``config.max_tokens_per_rank``.
    """
    limits, needed = dispatcher_class(config.dispatcher, config.dispatch_backend).limits, 0
    for has_limit, chunk in zip(limits, (config.chunk_size, 0)):
        rows = config.max_running * verified + min(chunk, config.max_running * config.max_context)
        # Only the interleaved split spreads any mix of requests evenly over the cp ranks; drafts are not split.
        if config.cp_split == "interleave" and (chunk or config.cp_decode == "split"):
            rows = -(-rows // topology.cp)
        rows = max(rows, config.max_running * drafted)
        needed = max(needed, has_limit * -(-rows // topology.attn_tp) * topology.moe_tp)
    given = config.max_tokens_per_rank
    if given is not None and given < needed:
        raise ValueError(
            f"--max-tokens-per-rank is {given}, but a step may have {needed} rows on a rank: --max-running "
            f"{config.max_running} requests of {max(verified, drafted)} rows each"
            + (f", and --chunk-size {config.chunk_size}" if limits[0] else "")
        )
    return DispatchOptions(config.dispatcher, config.dispatch_backend, given or needed, config.fp8_dispatch)


def tree_shape(config: EngineConfig, model_config: Config, draft: type[Drafter], depth: int) -> TreeShape | None:
    """The trees that are drafted and verified, of ``depth`` levels; None for blocks.

    Raises ``ValueError`` naming the kind or the draft if one of the two cannot.
    """
    if config.tree == "none":
        return None
    option = f"--tree {config.tree}"
    if not draft.grows_trees:
        able = ", ".join(name for name in DRAFTERS if drafter_class(name).grows_trees)
        raise ValueError(f"{option}: the draft {config.draft} proposes blocks only; those that grow trees: {able}")
    check_whole(model_config, option, "leave --tree out")
    if config.cp_keys == "ring":
        raise ValueError(f"{option} needs every key at hand, but --cp-keys ring passes them on; use --cp-keys gather")
    return TreeShape.make(config.tree, config.tree_nodes, config.tree_topk, depth, model_config.vocab_size)


def check_whole(model_config: Config, option: str, way_out: str) -> None:
    """Raise ``ValueError`` for a model with layers that do not see every position, which ``option`` needs."""
    labels = family(model_config.model_type).layer_labels(model_config)
    others = [label for label in dict.fromkeys(labels) if label not in WHOLE_LABELS]
    if others:
        raise ValueError(
            f"{option} is for layers of the kinds {', '.join(WHOLE_LABELS)}, but the model has {', '.join(others)}; "
            f"{way_out}"
        )


def check_no_experts(config: EngineConfig, model_type: str) -> None:
    """Raise ``ValueError`` for options about experts, of a model that has none."""
    asked = {
        f"--dispatcher {config.dispatcher}": config.dispatcher not in ("standard", "auto"),
        f"--expert-format {config.expert_format}": config.expert_format != "native",
        "--fp8-dispatch": config.fp8_dispatch,
    }
    for option, given in asked.items():
        if given:
            raise ValueError(f"{option} is about experts, but this {model_type} model has none")


def check_untrimmed(config: EngineConfig) -> None:
    """Raise ``ValueError`` if ``config`` calibrates confidences or trims verification by them; for drafts that have
    none."""
    if config.sts is not None:
        raise ValueError(f"--sts {config.sts} calibrates confidences, but the draft has none; leave --sts out")
    by_table = config.verify != "static" and config.sps_table is not None
    if by_table or config.confidence_threshold is not None:
        option = f"--verify {config.verify}" if by_table else "--confidence-threshold"
        raise ValueError(f"{option} needs confidences, but the draft has no confidence head; use --verify static")
