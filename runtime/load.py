"""From a resolved config to an engine: the checkpoint read, the draft chosen, the cache made, on this rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ..comm.collectives import all_gather_ints
from ..comm.dispatch import DispatchOptions, dispatcher_class
from ..layers.kernels import choose
from ..layers.params import OnDevice
from ..parallel.groups import Group, Groups
from ..parallel.pipeline import stage_layers
from ..parallel.topology import Topology
from .balance import ExpertLinks, expert_placements, make_keeper
from .cache import Cache, CacheLayout, pages_within
from .checkpoint import CheckpointReader
from .decide import StopStrings
from .draft import Drafter, draft_config, drafter_class
from .draft.base import DraftElsewhere, DraftRoom
from .draft.files import DraftFiles
from .engine import Engine
from .engine_config import EngineConfig
from .graphs import Graphs, record_on_cuda
from .model_config import Config, load_model_config, only_for
from .models import family

RING_LABELS = ("mha", "gqa", "mqa", "mla")
"""Attention kinds that see every position."""


def load_engine(
    config: EngineConfig,
    groups: Groups,
    device: torch.device,
    *,
    model_config: Config | None = None,
    text: StopStrings | None = None,
    progress: Callable[[int], None] | None = None,
    links: ExpertLinks = None,
) -> Engine:
    """Read the checkpoint of a resolved ``config`` and make room for ``config.max_running`` requests a DP rank.

    ``text`` knows stop strings, on the first rank of the tensor group; ``progress`` is told bytes as they are read;
    ``links`` is what :func:`.balance.expert_links` gave.
    Raises ``ValueError`` naming what is wrong with the checkpoint.
    """
    model_config = load_model_config(config.model) if model_config is None else model_config
    if config.deterministic:
        only_for(model_config, "deepseek_v4", "--deterministic")
    if config.cp_keys == "ring":
        check_ring(model_config)
    dtype = getattr(torch, config.dtype)
    reader = CheckpointReader(config.model, model_config, dtype, progress=progress)
    source = OnDevice(reader, device)
    kernels, draft = (
        choose(device, dtype, config.deterministic, config.kernels, config.formats),
        drafter_class(config.draft),
    )
    settings = draft_config(config.draft, model_config, config.draft_model)
    if config.prefix_cache and not draft.resumes:
        raise ValueError(f"--prefix-cache stores nothing of the draft {config.draft}; take another draft")
    taps = draft.tap_layers(settings)
    max_verify = 1 + (config.gamma or draft.default_gamma(settings))
    dispatch = dispatch_options(config, groups.topology, max_verify, 1 + draft.max_gamma(settings))
    placements = expert_placements(config, model_config, groups.topology, max_verify > 1)
    target = placements.target and placements.target.placement
    sizes = (config.max_context, device, taps, dtype, draft.tap_kind, dispatch, target)
    model = family(model_config.model_type).build(model_config, source, groups, kernels, *sizes)
    if max_verify > 1 and not draft.has_confidence(settings):
        check_untrimmed(config)
    num_rows = draft_rows(draft, settings, max_verify)
    own = placements.draft and placements.draft.placement
    room = DraftRoom(config.max_running, config.max_context, num_rows, own)
    if model.is_last:
        if max_verify > 1 and groups.tp.rank == 0:  # the draft uses the target's own
            reader.check_copies()
        drafter = draft.load(settings, source, model, groups, kernels, room, config.gamma)
    else:
        drafter = DraftElsewhere(max_verify - 1)
    if device.type == "cuda" and config.cache_pages is None and config.cache_bytes is None:
        left = left_for_cache(*torch.cuda.mem_get_info(device), config.gpu_memory_share)
        left = min(row[0] for row in all_gather_ints([left], groups.world, device))
        config = dataclasses.replace(config, cache_bytes=max(left, 1))
    cache = make_cache(model_config, config, device, max_verify, groups.pp, groups.attn_tp.size)
    layers = (model.expert_layers, drafter.expert_layers)
    keeper = make_keeper(config, groups, links, placements, layers)
    graphs = None
    if kernels.backend == "triton" and device.type == "cuda" and fits_graphs(config, groups.world.size, model_config):
        graphs = Graphs(model, cache, groups, config.max_context, record_on_cuda)
    return Engine(model, drafter, cache, groups, config, text, graphs, keeper)


def fits_graphs(config: EngineConfig, num_ranks: int, model_config: Config) -> bool:
    """Whether small steps may be CUDA graphs: all work is on one GPU, nothing waits for the host as rows that travel
    do, and no pick is counted, since rows that fill up a graph would be, too."""
    counts = config.eplb_interval is not None or config.eplb_record is not None
    alone = num_ranks == 1 and not config.all_to_all
    return config.graphs and alone and not counts and model_config.model_type == "deepseek_v4"


def left_for_cache(free: int, total: int, share: float) -> int:
    """Bytes that the cache may take of a GPU with ``free`` of ``total`` bytes, if everything together may take
    ``share`` of it; the rest is for activations and graphs."""
    return free - round((1 - share) * total)


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


def draft_rows(draft: type[Drafter], settings: Config | DraftFiles, max_verify: int) -> int:
    """Rows of a draft's rings beyond its window.

    A block may be stored as wide as it was trained, and the rows before the one that follows it must survive that.
    """
    return 2 * (1 + max(max_verify - 1, draft.max_gamma(settings)))


def check_ring(model_config: Config) -> None:
    """Raise ``ValueError`` for a model with layers whose keys cannot be passed from rank to rank."""
    labels = family(model_config.model_type).layer_labels(model_config)
    others = [label for label in dict.fromkeys(labels) if label not in RING_LABELS]
    if others:
        raise ValueError(
            f"--cp-keys ring is for layers of the kinds {', '.join(RING_LABELS)}, but the model has "
            f"{', '.join(others)}; use --cp-keys gather"
        )


def check_untrimmed(config: EngineConfig) -> None:
    """Raise ``ValueError`` if ``config`` trims verification by confidences; for drafts that have none."""
    by_table = config.verify != "static" and config.sps_table is not None
    if by_table or config.confidence_threshold is not None:
        option = f"--verify {config.verify}" if by_table else "--confidence-threshold"
        raise ValueError(f"{option} needs confidences, but the draft has no confidence head; use --verify static")


def make_cache(
    model_config: Config,
    config: EngineConfig,
    device: torch.device,
    max_verify: int = 1,
    pipeline: Group | None = None,
    attn_tp: int = 1,
) -> Cache:
    """A cache for ``config.max_running`` requests, of ``config.max_context`` tokens each unless its size is given.

    ``max_verify``: rows of the widest step that may be rolled back. ``pipeline``: whose stages share the layers; all
    layers are here without one. ``attn_tp``: ranks that share the heads. Raises ``ValueError`` if
    ``config.cache_bytes`` leaves no room for a page.
    """
    dtype, num_layers, num_slots = getattr(torch, config.dtype), model_config.num_layers, config.max_running
    stages = [range(num_layers)] if pipeline is None else stage_layers(num_layers, pipeline.size)
    layouts = [cache_layout(model_config, layers, max_verify, dtype.itemsize, attn_tp) for layers in stages]
    layout = layouts[0 if pipeline is None else pipeline.rank]
    num_pages = num_slots * layout.pages_for(config.max_context) if config.cache_pages is None else config.cache_pages
    if config.cache_bytes is not None:
        num_pages = min(num_pages, pages_within(layouts, num_slots, config.num_snapshots, config.cache_bytes))
    return Cache(layout, num_slots, num_pages, config.max_context, device, dtype)


def cache_layout(config: Config, layers: range, max_verify: int, itemsize: int, attn_tp: int = 1) -> CacheLayout:
    """The cache of some of the target's ``layers``, on a rank of the ``attn_tp`` that share the heads."""
    rows = family(config.model_type).cache_rows(config, attn_tp)
    ratios = CacheLayout(rows, max_verify, itemsize).ratios
    return CacheLayout(rows[layers.start : layers.stop], max_verify, itemsize, model_ratios=ratios)
