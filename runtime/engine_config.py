"""The engine's options: one frozen object, resolved once, and the one list of what this version cannot do yet."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import torch

from ..comm.dispatch import dispatcher_class
from ..layers.kernels import default_choice

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
KERNELS = ("auto", "torch", "cpu", "triton")
EXPERT_FORMATS = ("native", "fp8", "fp4")
LINEAR_FORMATS = ("native", "fp8")
KV_FORMATS = ("native", "fp8")
VERIFY_MODES = ("static", "sync", "async")
TREES = ("none", "static", "dynamic")
CP_SPLITS = ("interleave", "zigzag")
CP_DECODES = ("split", "replicate")
CP_KEYS = ("gather", "ring")
EXPECTED_SHARES = {"worst_case": None, "optimistic": 0.7}
OVERLAP_MODES = ("none", "tbo", "sbo")
DISPATCHERS = ("standard", "normal", "low_latency", "auto")
DISPATCH_BACKENDS = ("auto", "torch", "deep_ep", "deep_ep_elastic")
REPLICA_SPLITS = ("even", "nearest", "weighted")
MAX_CHUNK_SIZE = 1 << 20
MAX_RUNNING = 1 << 16
MAX_REDUNDANT = 1 << 16
MAX_TREE_NODES = 1 << 10
PATHS = (
    "model",
    "draft_model",
    "sps_table",
    "sts",
    "init_expert_location",
    "init_draft_expert_location",
    "eplb_record",
    "eplb_draft_record",
)


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine; the names are those of the command line.

    ``model`` is a checkpoint folder (``None``: the bundled one). ``chunk_size`` counts prefill tokens a step and DP
    rank, ``max_running`` requests in flight, ``max_context`` tokens of prompt and continuation together (``None``:
    the model's own limit). ``dtype`` is the dtype of activations and unquantised weights, ``kernels`` the choice of
    :func:`..layers.kernels.choose`. ``expert_format`` and ``linear_format``: how the weights of routed experts, and of
    row-parallel and shared-expert products, are packed, ``kv_format``: how sliding and compressed keys are in the cache
    of a V4 model. ``graphs``: small steps are CUDA graphs where they can be.
    ``mixed_chunk``: prefill tokens of a step beside up to 8 decoding requests a DP rank, in proportion with more;
    ``None``: 24 on CPU, else as many as ``chunk_size``.
    ``draft_model`` is the folder of a draft that is a checkpoint of its own. ``tree``: what it proposes is a tree of
    ``tree_nodes`` nodes with ``tree_topk`` children each and ``gamma`` levels, see :class:`..draft.growth.TreeShape`.

    The cache of a DP rank has ``cache_pages`` pages, or what fits into ``cache_bytes`` a rank, or enough for
    ``max_running`` requests of ``max_context`` tokens, or what a GPU has left if weights and cache may take
    ``gpu_memory_share`` of it. ``admission``: "worst_case", "optimistic", or the share of its
    new tokens that a request must find memory for. ``prefix_cache`` keeps up to ``prefix_pages`` pages (``None``:
    ``max_running``) of finished prefixes for requests that begin alike.

    ``max_tokens_per_rank``: rows that a rank may send to experts at once where buffers are fixed (``None``: what the
    other options can need). ``fp8_dispatch``: they travel as 8-bit floats there. ``overlap_min_rows``: with fewer rows
    on the busiest rank a step is run without overlap, since that would cost more than it hides.

    Experts: ``num_redundant_experts`` slots a layer beyond one per expert, and the same for a draft's own experts;
    ``replica_split``: which copy of an expert a pick goes to: in turn, the nearest, or such that ranks get alike.
    ``init_..._location``: files that say which expert each slot holds at the start. ``eplb_record``: a file for counts
    of expert picks, ``eplb_draft_record`` for the draft's. With ``eplb_interval`` experts are rebalanced after every so
    many steps if their balance is below ``eplb_threshold``, until ``eplb_target`` is reached in every layer or
    ``eplb_max_moves`` experts have moved; ``eplb_layers_per_step`` layers change together.
    """

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    kernels: str = "auto"
    expert_format: str = "native"
    linear_format: str = "native"
    kv_format: str = "native"
    graphs: bool = True
    chunk_size: int = 512
    mixed_chunk: int | None = None
    max_running: int = 64
    max_context: int | None = None
    admission: str = "worst_case"
    cache_pages: int | None = None
    cache_bytes: int | None = None
    gpu_memory_share: float = 0.85
    prefix_cache: bool = False
    prefix_pages: int | None = None
    seed: int = 0
    deterministic: bool = False
    draft: str = "auto"
    draft_model: str | None = None
    gamma: int | None = None
    tree: str = "none"
    tree_nodes: int | None = None
    tree_topk: int | None = None
    verify: str = "static"
    sps_table: str | None = None
    sts: str | None = None
    confidence_threshold: float | None = None
    block_verify: bool = False
    cp_split: str = "interleave"
    cp_decode: str = "split"
    cp_keys: str = "gather"
    overlap: str = "none"
    dispatcher: str = "standard"
    dispatch_backend: str = "auto"
    max_tokens_per_rank: int | None = None
    fp8_dispatch: bool = False
    overlap_min_rows: int = 256
    num_redundant_experts: int = 0
    num_redundant_draft_experts: int = 0
    init_expert_location: str | None = None
    init_draft_expert_location: str | None = None
    eplb_record: str | None = None
    eplb_draft_record: str | None = None
    replica_split: str = "even"
    eplb_interval: int | None = None
    eplb_threshold: float = 1.0
    eplb_target: float = 0.98
    eplb_max_moves: int | None = None
    eplb_layers_per_step: int = 1

    @property
    def all_to_all(self) -> bool:
        """Whether rows travel to the ranks of their experts."""
        return self.dispatcher in DISPATCHERS and dispatcher_class(self.dispatcher).all_to_all

    @property
    def formats(self) -> dict[str, str]:
        """The packed operations, see :class:`..layers.kernels.Kernels`."""
        formats = {"experts_forward": self.expert_format, "block_linear": self.linear_format}
        return {operation: name for operation, name in formats.items() if name != "native"}

    @property
    def places_experts(self) -> bool:
        """Whether anything is wanted of where experts are: copies, a map, counts, or that they move."""
        return bool(self.num_redundant_experts or self.num_redundant_draft_experts) or any(
            value is not None
            for value in (
                self.init_expert_location,
                self.init_draft_expert_location,
                self.eplb_record,
                self.eplb_draft_record,
                self.eplb_interval,
            )
        )

    @property
    def num_snapshots(self) -> int:
        """Pages of prefixes that are kept, each with a copy of the rings at its end."""
        if not self.prefix_cache:
            return 0
        return self.max_running if self.prefix_pages is None else self.prefix_pages

    @property
    def expected_share(self) -> float | None:
        """The share of its new tokens that a request must find memory for to be admitted; None for all, for good.

        Raises ``ValueError`` if ``admission`` is none of its values.
        """
        if self.admission in EXPECTED_SHARES:
            return EXPECTED_SHARES[self.admission]
        try:
            share = float(self.admission)
        except (TypeError, ValueError):
            share = -1.0
        if not 0 <= share <= 1:
            raise ValueError(
                f"--admission is {self.admission!r}; allowed: {', '.join(EXPECTED_SHARES)}, or a share from 0 to 1"
            )
        return share

    def validate(self) -> EngineConfig:
        """Return ``self``; raise ``ValueError`` naming the first option out of range, its value and the range."""
        _check_values(self)
        if self.deterministic and self.places_experts:
            raise ValueError("--deterministic shares out experts by columns: nothing can be placed, counted or moved")
        if self.deterministic and self.dispatcher != "standard":
            raise ValueError(
                f"--deterministic needs the dispatcher standard: with {self.dispatcher}, sums of rows that travel are "
                "rounded in another order"
            )
        cut = self.confidence_threshold
        if cut is not None and not (type(cut) in (int, float) and 0 <= cut <= 1):
            raise ValueError(f"--confidence-threshold is {cut!r}; allowed: a number from 0 to 1")
        share = self.gpu_memory_share
        if not (type(share) in (int, float) and 0 < share <= 1):
            raise ValueError(f"--gpu-memory-share is {share!r}; allowed: a number above 0, at most 1")
        for name in ("eplb_threshold", "eplb_target"):
            share = getattr(self, name)
            if not (type(share) in (int, float) and 0 < share <= 1):
                raise ValueError(f"{_flag(name)} is {share!r}; allowed: a number above 0 and at most 1")
        for name in ("eplb_record", "eplb_draft_record"):
            path = getattr(self, name)
            if path is not None and not str(path).endswith(".npz"):
                raise ValueError(f"{_flag(name)} is {str(path)!r}; loads are recorded as .npz")
        if self.eplb_record is not None and self.eplb_record == self.eplb_draft_record:
            raise ValueError(f"--eplb-record and --eplb-draft-record are both {self.eplb_record}")
        _ = self.expected_share
        if self.cache_pages is not None and self.cache_bytes is not None:
            raise ValueError("--cache-pages and --cache-bytes both size the cache; give one of them")
        _check_effect(self)
        return self


def resolve(
    config: EngineConfig, *, model_dir: str, device_type: str, max_positions: int, own_draft: str
) -> EngineConfig:
    """A new config with every "auto" decided: the folder, "cpu" or "cuda", dtype, kernels, context limit, draft.

    Args:
        model_dir: the checkpoint folder in use.
        device_type: ``"cpu"`` or ``"cuda"``, as the launcher chose.
        max_positions: the longest context the model was made for, in tokens.
        own_draft: the draft that the checkpoint brings, ``"none"`` if it has none.

    Raises ``ValueError`` for options out of range, a ``max_context`` above ``max_positions``, or options of a draft
    where there is none.
    """
    config.validate()
    if config.max_context is not None and config.max_context > max_positions:
        raise ValueError(
            f"--max-context is {config.max_context}, but the model has {max_positions} positions "
            "(max_position_embeddings); choose at most that"
        )
    draft = own_draft if config.draft == "auto" else config.draft
    if draft == "none":
        _check_no_draft_options(config)
    default_dtype = {"cpu": "float32", "cuda": "bfloat16"}[device_type]
    dtype = default_dtype if config.dtype == "auto" else config.dtype
    kernels = default_choice(device_type, getattr(torch, dtype)) if config.kernels == "auto" else config.kernels
    if config.deterministic and config.kv_format != "native" and kernels != "triton":
        raise ValueError(f"--deterministic with --kv-format {config.kv_format} needs --kernels triton, not {kernels}")
    # On a CPU every row costs time, on a GPU rows beside decoding ones are nearly free for long.
    default_mixed = {"cpu": min(24, config.chunk_size), "cuda": config.chunk_size}[device_type]
    return dataclasses.replace(
        config,
        model=model_dir,
        device=device_type,
        dtype=dtype,
        kernels=kernels,
        mixed_chunk=default_mixed if config.mixed_chunk is None else config.mixed_chunk,
        max_context=max_positions if config.max_context is None else config.max_context,
        draft=draft,
        dispatch_backend="torch" if config.dispatch_backend == "auto" else config.dispatch_backend,
    )


def _check_values(config: EngineConfig) -> None:
    """Raise ``ValueError`` for the first choice, integer, switch or path that is none or out of range."""
    for name, allowed in (
        ("device", DEVICES),
        ("dtype", DTYPES),
        ("kernels", KERNELS),
        ("expert_format", EXPERT_FORMATS),
        ("linear_format", LINEAR_FORMATS),
        ("kv_format", KV_FORMATS),
        ("verify", VERIFY_MODES),
        ("tree", TREES),
        ("cp_split", CP_SPLITS),
        ("cp_decode", CP_DECODES),
        ("cp_keys", CP_KEYS),
        ("overlap", OVERLAP_MODES),
        ("dispatcher", DISPATCHERS),
        ("dispatch_backend", DISPATCH_BACKENDS),
        ("replica_split", REPLICA_SPLITS),
    ):
        if getattr(config, name) not in allowed:
            raise ValueError(f"{_flag(name)} is {getattr(config, name)!r}; allowed: {', '.join(allowed)}")
    for name, low, high in (
        ("chunk_size", 1, MAX_CHUNK_SIZE),
        ("mixed_chunk", 1, MAX_CHUNK_SIZE),
        ("max_running", 1, MAX_RUNNING),
        ("max_context", 2, None),
        ("gamma", 1, None),
        ("tree_nodes", 1, MAX_TREE_NODES),
        ("tree_topk", 1, MAX_TREE_NODES),
        ("cache_pages", 1, None),
        ("cache_bytes", 1, None),
        ("prefix_pages", 1, None),
        ("max_tokens_per_rank", 1, None),
        ("overlap_min_rows", 1, None),
        ("seed", 0, (1 << 63) - 1),
        ("num_redundant_experts", 0, MAX_REDUNDANT),
        ("num_redundant_draft_experts", 0, MAX_REDUNDANT),
        ("eplb_interval", 1, None),
        ("eplb_max_moves", 1, None),
        ("eplb_layers_per_step", 1, None),
    ):
        value = getattr(config, name)
        if value is None and getattr(EngineConfig, name) is None:
            continue
        if type(value) is not int or value < low or (high is not None and value > high):
            upper = "" if high is None else f" to {high}"
            raise ValueError(f"{_flag(name)} is {value!r}; allowed: an integer from {low}{upper}")
    for name in ("graphs", "deterministic", "prefix_cache", "block_verify", "fp8_dispatch"):
        if type(getattr(config, name)) is not bool:
            raise ValueError(f"{_flag(name)} is {getattr(config, name)!r}; allowed: true or false")
    for name in PATHS:
        if getattr(config, name) == "" or not isinstance(getattr(config, name), (str, os.PathLike, type(None))):
            raise ValueError(f"{_flag(name)} is {getattr(config, name)!r}; allowed: a path")


def _check_effect(config: EngineConfig) -> None:
    """Raise ``ValueError`` for options that would silently do nothing beside the others."""
    if config.prefix_pages is not None and not config.prefix_cache:
        raise ValueError(f"--prefix-pages {config.prefix_pages} keeps nothing without --prefix-cache")
    for name in ("tree_nodes", "tree_topk"):
        if config.tree == "none" and getattr(config, name) is not None:
            raise ValueError(f"{_flag(name)} {getattr(config, name)} changes nothing without --tree")
    for name in ("verify", "block_verify") if config.tree != "none" else ():
        value = getattr(config, name)
        if value != getattr(EngineConfig, name):
            shown = _flag(name) if value is True else f"{_flag(name)} {value}"
            raise ValueError(f"{shown} is for blocks, but --tree {config.tree} is verified whole, node by node")
    backend = "torch" if config.dispatch_backend == "auto" else config.dispatch_backend
    kind, chosen = dispatcher_class(config.dispatcher, backend), f"the dispatcher {config.dispatcher} of {backend}"
    if config.max_tokens_per_rank is not None and not any(kind.limits):
        raise ValueError(f"--max-tokens-per-rank {config.max_tokens_per_rank}: {chosen} has no fixed buffers")
    if config.fp8_dispatch and not kind.sends_fp8:
        raise ValueError(f"--fp8-dispatch: {chosen} sends no 8-bit floats")
    if config.sps_table is not None and config.verify == "static":
        raise ValueError(f"--sps-table {config.sps_table} changes nothing with --verify static")
    if config.replica_split != "even" and not (config.num_redundant_experts or config.num_redundant_draft_experts):
        raise ValueError(f"--replica-split {config.replica_split} needs copies: give --num-redundant-experts")
    if config.replica_split == "nearest" and not config.all_to_all:
        raise ValueError("--replica-split nearest: with the dispatcher standard no row travels, so no copy is nearer")
    for name in ("eplb_threshold", "eplb_target", "eplb_max_moves", "eplb_layers_per_step"):
        value = getattr(config, name)
        if config.eplb_interval is None and value != getattr(EngineConfig, name):
            raise ValueError(f"{_flag(name)} {value} changes nothing without --eplb-interval")


def _check_no_draft_options(config: EngineConfig) -> None:
    """Options that would silently do nothing: ``--gamma`` is refused where the draft is loaded."""
    if config.verify != EngineConfig.verify:
        raise ValueError(f"--verify {config.verify} is for a draft, but there is none; leave it out")
    for name in ("sps_table", "sts", "confidence_threshold", "block_verify", "tree"):
        value = getattr(config, name)
        if value not in (None, False, "none"):
            shown = _flag(name) if value is True else f"{_flag(name)} {value}"
            raise ValueError(f"{shown} is for a draft, but there is none; leave it out")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
