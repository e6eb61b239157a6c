"""From a resolved config to an engine: the checkpoint read, the draft chosen, the cache made, on this rank."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import torch

from ..comm.collectives import all_gather_ints
from ..layers.params import OnDevice
from ..parallel.groups import Group, Groups
from ..parallel.pipeline import stage_layers
from ..parallel.topology import Topology
from .balance import ExpertLinks, make_keeper
from .cache import Cache, CacheLayout, pages_within
from .checkpoint import CheckpointReader
from .decide import StopStrings
from .draft import Drafter
from .draft.base import DraftElsewhere, DraftRoom
from .draft.files import DraftFiles
from .engine import Engine
from .engine_config import EngineConfig
from .graphs import Graphs, record_on_cuda
from .load_plan import plan_load
from .model_config import Config, load_model_config, only_for
from .models import family

log = logging.getLogger(__name__)


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
    plan = plan_load(config, model_config, groups.topology, device)
    draft, settings, max_verify, tree = plan.draft, plan.settings, plan.max_verify, plan.tree
    dtype = getattr(torch, config.dtype)
    reader = CheckpointReader(config.model, model_config, dtype, progress=progress)
    source = OnDevice(reader, device)
    target, own = plan.placements
    sizes = (config.max_context, device, plan.taps, dtype, draft.tap_kind, plan.dispatch, target)
    model = family(model_config.model_type).build(model_config, source, groups, plan.kernels, *sizes)
    assert groups.world.size > 1 or not reader.untaken(), f"nothing read {', '.join(reader.untaken())}"
    num_rows = draft_rows(draft, settings, max_verify)
    room = DraftRoom(config.max_running, config.max_context, num_rows, own, tree)
    if model.is_last:
        if max_verify > 1 and groups.tp.rank == 0:  # the draft uses the target's own
            reader.check_copies()
        drafter = draft.load(settings, source, model, groups, plan.kernels, room, config.gamma)
    else:
        drafter = DraftElsewhere(max_verify - 1, tree)
    if device.type == "cuda" and config.cache_pages is None and config.cache_bytes is None:
        left = left_for_cache(*torch.cuda.mem_get_info(device), config.gpu_memory_share)
        left = min(row[0] for row in all_gather_ints([left], groups.world, device))
        config = dataclasses.replace(config, cache_bytes=max(left, 1))
    num_branches = tree.num_drafts if tree is not None else 0
    cache = make_cache(model_config, config, device, max_verify, groups.pp, groups.attn_tp.size, num_branches)
    layers = (model.expert_layers, drafter.expert_layers)
    keeper = make_keeper(config, groups, links, plan.placements, layers)
    graphs = None
    if plan.kernels.backend == "triton" and device.type == "cuda":
        obstacle = graph_obstacle(config, groups.topology, model_config)
        if obstacle is None:
            graphs = Graphs(model, cache, groups, config.max_context, record_on_cuda)
        else:
            log.info("no CUDA graphs: %s", obstacle)
    return Engine(model, drafter, cache, groups, config, text, graphs, keeper)


def graph_obstacle(config: EngineConfig, topology: Topology, model_config: Config) -> str | None:
    """Why small steps cannot be CUDA graphs, or None: every rank must run the same rows, nothing may wait for the host,
    and no pick may be counted, since rows that fill up a graph would be, too."""
    if not config.graphs:
        return "--no-graphs"
    if model_config.model_type != "deepseek_v4":
        return f"they are for deepseek_v4 models, but this one is {model_config.model_type}"
    if topology.attn_tp < topology.world:
        sizes = ", ".join(f"{name} {getattr(topology, name)}" for name in ("pp", "dp", "cp"))
        return f"ranks have rows of their own ({sizes})"
    if config.all_to_all:
        return f"the dispatcher {config.dispatcher} waits for numbers of rows"
    if config.overlap != "none" and topology.world > 1:
        return f"--overlap {config.overlap} cuts steps in two"
    if config.eplb_interval is not None or config.eplb_record is not None:
        return "picks of experts are counted"
    if config.replica_split == "weighted":
        return "--replica-split weighted counts picks on the host"
    return None


def left_for_cache(free: int, total: int, share: float) -> int:
    """Bytes that the cache may take of a GPU with ``free`` of ``total`` bytes, if everything together may take
    ``share`` of it; the rest is for activations and graphs."""
    return free - round((1 - share) * total)


def draft_rows(draft: type[Drafter], settings: Config | DraftFiles, max_verify: int) -> int:
    """Rows of a draft's rings beyond its window.

    A block may be stored as wide as it was trained, and the rows before the one that follows it must survive that.
    """
    return 2 * (1 + max(max_verify - 1, draft.max_gamma(settings)))


def make_cache(
    model_config: Config,
    config: EngineConfig,
    device: torch.device,
    max_verify: int = 1,
    pipeline: Group | None = None,
    attn_tp: int = 1,
    num_branches: int = 0,
) -> Cache:
    """A cache for ``config.max_running`` requests, of ``config.max_context`` tokens each unless its size is given.

    ``max_verify``: rows of the widest step that may be rolled back. ``pipeline``: whose stages share the layers; all
    layers are here without one. ``attn_tp``: ranks that share the heads. ``num_branches``: nodes of a draft tree.
    Raises ``ValueError`` if ``config.cache_bytes`` leaves no room for a page.
    """
    dtype, num_layers, num_slots = getattr(torch, config.dtype), model_config.num_layers, config.max_running
    stages = [range(num_layers)] if pipeline is None else stage_layers(num_layers, pipeline.size)
    sizes = (max_verify, dtype.itemsize, attn_tp, config.kv_format == "fp8", num_branches)
    layouts = [cache_layout(model_config, layers, *sizes) for layers in stages]
    layout = layouts[0 if pipeline is None else pipeline.rank]
    num_pages = num_slots * layout.pages_for(config.max_context) if config.cache_pages is None else config.cache_pages
    if config.cache_bytes is not None:
        num_pages = min(num_pages, pages_within(layouts, num_slots, config.num_snapshots, config.cache_bytes))
    return Cache(layout, num_slots, num_pages, config.max_context, device, dtype)


def cache_layout(
    config: Config,
    layers: range,
    max_verify: int,
    itemsize: int,
    attn_tp: int = 1,
    packed: bool = False,
    num_branches: int = 0,
) -> CacheLayout:
    """The cache of some of the target's ``layers``, on a rank of the ``attn_tp`` that share the heads; ``packed`` for
    ``--kv-format fp8``, ``num_branches`` nodes of a draft tree. Raises ``ValueError`` for layers whose keys cannot be
    packed."""
    if packed:
        only_for(config, "deepseek_v4", "--kv-format fp8")
    rows = family(config.model_type).cache_rows(config, attn_tp)
    ratios = CacheLayout(rows, max_verify, itemsize).ratios
    own, options = rows[layers.start : layers.stop], {"packed": packed, "num_branches": num_branches}
    return CacheLayout(own, max_verify, itemsize, model_ratios=ratios, **options)
