"""Every kernel at the sizes of a V4-Flash layer, with the bytes it must move and the operations it must do.

Legend: T rows, R requests of BLOCK rows each (a verify step), P context, D hidden width, H heads, d head width.

Bytes count every operand once: weights and rows from memory, results to memory, whatever fits a cache read once.
Operations count a multiplication and an addition as two. A floor is the larger of both times on an H200.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...layers.attention.plan import AttentionPlan, LayerCache, Rows
from ...layers.kernels import Kernels
from ...layers.kernels.block_attention import Attended
from ...layers.kernels.moe import Routing
from ...layers.kernels.packed_keys import packed_width
from ...layers.kernels.projection import ProjectionSizes
from ...layers.kernels.quantised import BLOCK as BLOCK_SIZE
from ...layers.kernels.quantised import FP4_GROUP, FP8, PackedWeight
from ...layers.rope import RopeTable

BYTES_PER_SECOND = 4.8e12  # H200 memory
OPERATIONS_PER_SECOND = {"float8": 1979e12, "bfloat16": 989e12, "float32": 67e12}  # dense tensor cores; plain units

D, STREAMS, HEADS, HEAD, ROPE, LATENT = 4096, 4, 64, 512, 64, 1024
INDEX_HEADS, INDEX, TOP_ENTRIES, WINDOW, GROUPS, GROUP_RANK = 64, 128, 512, 128, 8, 1024
EXPERTS, TOP_EXPERTS, WIDTH, LIMIT = 256, 6, 2048, 10.0
RATIOS = {"csa": 4, "hca": 128}
RAW_WIDTHS = {"csa": 4 * (HEAD + INDEX), "hca": 2 * HEAD}
PAGE_TOKENS, BLOCK = 256, 8
VOCAB, MARKOV_RANK = 129280, 256
HALF = torch.bfloat16


class Case(NamedTuple):
    """``call()`` runs ``name`` once on tensors of its own; ``num_bytes`` and ``operations`` are the least it needs."""

    name: str
    call: Callable[[], object]
    num_bytes: int
    operations: int
    unit: str = "bfloat16"

    @property
    def floor(self) -> float:
        """Seconds on an H200 that nothing can beat."""
        return max(self.num_bytes / BYTES_PER_SECOND, self.operations / OPERATIONS_PER_SECOND[self.unit])


class Scene:
    """The tensors of a step of ``num_rows`` rows behind ``context`` tokens, on ``device`` ("meta" has no data)."""

    def __init__(self, device: torch.device, num_rows: int, context: int) -> None:
        self.device, self.num_rows, self.context = device, num_rows, context
        self.num_requests = max(num_rows // BLOCK, 1)
        self.rope = RopeTable(self.wide(context, ROPE // 2), self.wide(context, ROPE // 2))
        self.pages = -(-context // PAGE_TOKENS)

    def half(self, *shape: int) -> torch.Tensor:
        """bfloat16 noise."""
        return torch.randn(shape, dtype=HALF, device=self.device) * 0.1

    def wide(self, *shape: int) -> torch.Tensor:
        """float32 noise."""
        return torch.randn(shape, device=self.device) * 0.1

    def packed(self, name: str, *shape: int) -> PackedWeight:
        """A weight [.., in, out] of codes without meaning."""
        *front, num_in, num_out = shape
        codes = torch.randint(
            0, 100, (*front, num_in if name == "fp8" else num_in // 2, num_out), dtype=torch.uint8, device=self.device
        )
        if name == "fp8":
            scales = (*front, num_in // BLOCK_SIZE, num_out // BLOCK_SIZE)
            return PackedWeight(codes.view(FP8), torch.ones(scales, device=self.device), num_in)
        return PackedWeight(codes, torch.ones((*front, num_in // FP4_GROUP, num_out), device=self.device), num_in)

    def plan(self) -> AttentionPlan:
        """Requests that all verify at the end of the context."""
        at = torch.arange(self.num_rows, device=self.device)
        start = torch.full_like(at, self.context - BLOCK)
        rows = Rows(start + at % BLOCK, at // BLOCK, start, start + BLOCK, at)
        closing = {ratio: torch.arange(self.num_requests, device=self.device) * BLOCK for ratio in RATIOS.values()}
        num_pages = self.num_requests * self.pages
        table = torch.arange(num_pages, dtype=torch.int32, device=self.device).view(self.num_requests, self.pages)
        return AttentionPlan(rows, rows, table, closing, self.context - 1, None)

    def packed_keys(self, *front: int) -> torch.Tensor:
        """Keys in 8-bit floats, of codes without meaning."""
        shape = (*front, packed_width(HEAD, ROPE))
        return torch.randint(0, 100, shape, dtype=torch.uint8, device=self.device)

    def cache(self, kind: str, packed: bool = False) -> LayerCache:
        """The buffers of a layer of ``kind``, its keys in bfloat16 or packed."""
        ratio, num_pages = RATIOS[kind], self.num_requests * self.pages
        per_page = PAGE_TOKENS // ratio
        span, window, entries = 2 * ratio if kind == "csa" else ratio, WINDOW + BLOCK, (num_pages, per_page)
        return LayerCache(
            self.packed_keys(self.num_requests, window) if packed else self.half(self.num_requests, window, HEAD),
            self.half(self.num_requests, span + BLOCK, RAW_WIDTHS[kind]),
            self.packed_keys(*entries) if packed else self.half(*entries, HEAD),
            self.half(num_pages, per_page, INDEX),
            None,
        )


def _product(name: str, call: Callable[[], object], num_rows: int, num_in: int, num_out: int, groups: int = 1) -> Case:
    rows = num_rows * groups * (num_in + num_out)
    return Case(name, call, 2 * (groups * num_in * num_out + rows), 2 * num_rows * groups * num_in * num_out)


def row_cases(kernels: Kernels, scene: Scene) -> list[Case]:
    """Kernels that treat every row by itself."""
    t, plan, columns = scene.num_rows, scene.plan(), (2 + STREAMS) * STREAMS
    x, streams = scene.half(t, D), scene.half(t, STREAMS, D)
    q, kv = scene.half(t, HEADS, HEAD), scene.half(t, HEAD)
    weight_out = scene.half(GROUPS * GROUP_RANK, D)
    linear = kernels.bind("linear", weight=weight_out)
    grouped = kernels.bind("grouped_linear", weight=scene.half(GROUPS, HEADS * HEAD // GROUPS, GROUP_RANK))
    latent_rows, group_rows = scene.half(t, GROUPS * GROUP_RANK), q.view(t, GROUPS, -1)
    norm = kernels.bind("rms_norm", weight=scene.wide(D), eps=1e-6)
    turn = kernels.bind("head_norm_rope", rope=scene.rope, eps=1e-6)
    key = kernels.bind("key_norm_rope", weight=scene.wide(HEAD), rope=scene.rope, eps=1e-6)
    law = {"hc_eps": 1e-6, "norm_eps": 1e-6}
    fn, base, scale = scene.wide(STREAMS * D, columns), scene.wide(columns), scene.wide(3)
    read = kernels.bind(
        "hc_pre", fn=fn, base=base, scale=scale, norm_weight=scene.wide(D), num_iters=20, constrained=True, **law
    )
    write = kernels.bind("hc_post")
    post, comb = scene.wide(t, STREAMS), scene.wide(t, STREAMS, STREAMS)
    collapse = kernels.bind(
        "hc_collapse", fn=scene.wide(STREAMS * D, STREAMS), base=scene.wide(STREAMS), scale=scene.wide(1), **law
    )
    shared = kernels.bind("swiglu", limit=LIMIT)
    gate_up = scene.half(t, 2 * WIDTH)
    of_streams = 2 * t * STREAMS * D
    return [
        _product("linear (wo_b)", lambda: linear(latent_rows), t, GROUPS * GROUP_RANK, D),
        _product("grouped_linear (wo_a)", lambda: grouped(group_rows), t, HEADS * HEAD // GROUPS, GROUP_RANK, GROUPS),
        Case("rms_norm", lambda: norm(x), 4 * t * D, 4 * t * D, "float32"),
        Case("head_norm_rope", lambda: turn(q, plan), 4 * q.numel(), 5 * q.numel(), "float32"),
        Case("key_norm_rope", lambda: key(kv, plan), 4 * kv.numel(), 5 * kv.numel(), "float32"),
        Case(
            "hc_pre",
            lambda: read(streams),
            of_streams + 4 * fn.numel() + 2 * t * D,
            2 * t * STREAMS * D * (columns + 2),
            "float32",
        ),
        Case(
            "hc_post",
            lambda: write(streams, x, post, comb),
            2 * of_streams + 2 * t * D,
            2 * t * D * STREAMS * (STREAMS + 1),
            "float32",
        ),
        Case("hc_collapse", lambda: collapse(streams), of_streams + 2 * t * D, 2 * t * STREAMS * D * 6, "float32"),
        Case("swiglu", lambda: shared(gate_up), 6 * t * WIDTH, 8 * t * WIDTH, "float32"),
    ]


def attention_cases(kernels: Kernels, scene: Scene) -> list[Case]:
    """Kernels that read or write the cache."""
    t, plan, cache = scene.num_rows, scene.plan(), {kind: scene.cache(kind) for kind in RATIOS}
    q, keys, x = scene.half(t, HEADS, HEAD), scene.half(t, HEAD), scene.half(t, D)
    index_q, index_weights = scene.half(t, INDEX_HEADS, INDEX), scene.half(t, INDEX_HEADS)
    in_columns = LATENT + HEAD + RAW_WIDTHS["csa"] + INDEX_HEADS
    q_columns = HEADS * HEAD + INDEX_HEADS * INDEX
    project = kernels.bind(
        "project",
        weight_in=scene.half(D, in_columns),
        weight_q=scene.half(LATENT, q_columns),
        latent_norm=scene.wide(LATENT),
        key_norm=scene.wide(HEAD),
        sizes=ProjectionSizes(LATENT, HEAD, RAW_WIDTHS["csa"], HEADS, INDEX_HEADS, INDEX),
        rope=scene.rope,
        eps=1e-6,
    )
    products = D * in_columns + LATENT * q_columns
    found = [
        Case("project", lambda: project(x, plan), 2 * (products + t * (D + in_columns + q_columns)), 2 * t * products)
    ]
    for kind in RATIOS:
        found += [_pool(kernels, scene, plan, cache[kind], kind), _attend(kernels, scene, q, keys, cache[kind], kind)]
    select = kernels.bind("select_entries", ratio=4, top_k=TOP_ENTRIES, scale=0.01)
    visible = scene.context // 4
    found.append(
        Case(
            "select_entries",
            lambda: select(index_q, index_weights, cache["csa"], plan),
            2 * (index_q.numel() + scene.num_requests * visible * INDEX) + 4 * t * visible + 8 * t * TOP_ENTRIES,
            2 * t * INDEX_HEADS * visible * INDEX,
        )
    )
    store, raw = kernels.bind("store_rows"), scene.half(t, RAW_WIDTHS["csa"])
    written = 4 * t * (HEAD + RAW_WIDTHS["csa"])
    found.append(Case("store_rows", lambda: store(keys, raw, cache["csa"], plan), written, 0))
    return found


def _attend(
    kernels: Kernels, scene: Scene, q: torch.Tensor, keys: torch.Tensor, cache: LayerCache, kind: str, suffix: str = ""
) -> Case:
    ratio, plan, selected = RATIOS[kind], scene.plan(), None
    visible = scene.context // ratio
    if kind == "csa":
        selected = torch.arange(TOP_ENTRIES, device=scene.device).repeat(scene.num_rows, 1)
    # Rows of a request read the same window; their selected entries are taken to be different ones.
    rows_read = scene.num_rows * TOP_ENTRIES if kind == "csa" else scene.num_requests * (WINDOW + visible)
    sizes = {"window": WINDOW, "ratio": ratio, "scale": HEAD**-0.5}
    attend = kernels.bind("attend", sinks=scene.wide(HEADS), rope=scene.rope, **sizes)
    seen = WINDOW + (min(visible, TOP_ENTRIES) if kind == "csa" else visible)
    return Case(
        f"attend ({kind}{suffix})",
        lambda: attend(q, keys, cache, selected, plan),
        4 * q.numel() + rows_read * keys.shape[1] * keys.itemsize,
        4 * scene.num_rows * HEADS * seen * HEAD,
    )


def packed_key_cases(kernels: Kernels, scene: Scene) -> list[Case]:
    """Keys in 8-bit floats: packed, pooled, and read."""
    t, q, keys = scene.num_rows, scene.half(scene.num_rows, HEADS, HEAD), scene.half(scene.num_rows, HEAD)
    pack, packed, plan = kernels.bind("pack_keys", rotary=ROPE), scene.packed_keys(t), scene.plan()
    num_bytes = keys.numel() * keys.itemsize + packed.numel()
    found = [Case("pack_keys", lambda: pack(keys), num_bytes, 4 * keys.numel(), "float32")]
    for kind in RATIOS:
        cache = scene.cache(kind, packed=True)
        found.append(_pool(kernels, scene, plan, cache, kind, ", fp8 keys"))
        found.append(_attend(kernels, scene, q, packed, cache, kind, ", fp8 keys"))
    return found


def _pool(kernels: Kernels, scene: Scene, plan: AttentionPlan, cache: LayerCache, kind: str, suffix: str = "") -> Case:
    ratio, overlap, raw = RATIOS[kind], kind == "csa", scene.half(scene.num_rows, RAW_WIDTHS[kind])
    pool = kernels.bind(
        "pool_windows",
        ape=scene.wide(ratio, HEAD * (1 + overlap)),
        norm_weight=scene.wide(HEAD),
        rope=scene.rope,
        eps=1e-6,
        ratio=ratio,
        overlap=overlap,
        indexer=False,
    )
    numbers = scene.num_requests * ratio * (1 + overlap) * 2 * HEAD
    return Case(f"pool_windows ({kind}{suffix})", lambda: pool(raw, cache, plan), 2 * numbers, 8 * numbers, "float32")


def expert_cases(kernels: Kernels, scene: Scene) -> list[Case]:
    """Routing and experts."""
    t, logits, x = scene.num_rows, scene.wide(scene.num_rows, EXPERTS), scene.half(scene.num_rows, D)
    law = {"scoring": "sqrtsoftplus", "renormalise": True, "scale": 1.5}
    scored = kernels.bind("route_scored", bias=scene.wide(EXPERTS), top_k=TOP_EXPERTS, **law)
    hashed = kernels.bind("route_hashed", **law)
    chosen = torch.arange(t * TOP_EXPERTS, device=scene.device).view(t, TOP_EXPERTS) * 37 % EXPERTS
    gate_up, down = scene.half(EXPERTS, D, 2 * WIDTH), scene.half(EXPERTS, WIDTH, D)
    forward = kernels.bind("experts_forward", gate_up=gate_up, down=down, limit=LIMIT)
    routing, picks = Routing(chosen, scene.wide(t, TOP_EXPERTS)), t * TOP_EXPERTS
    used = min(picks, EXPERTS)
    packed = [_packed_experts(kernels, scene, x, routing, name, used) for name in ("fp8", "fp4")]
    return [
        *packed,
        Case("route_scored", lambda: scored(logits), 4 * logits.numel(), 40 * logits.numel(), "float32"),
        Case("route_hashed", lambda: hashed(logits, chosen), 4 * logits.numel(), 10 * logits.numel(), "float32"),
        Case(
            "experts_forward",
            lambda: forward(x, routing),
            2 * (used * 3 * D * WIDTH + 2 * x.numel()),
            2 * picks * 3 * D * WIDTH,
        ),
    ]


def _packed_experts(kernels: Kernels, scene: Scene, x: torch.Tensor, routing: Routing, name: str, used: int) -> Case:
    first, second = scene.packed(name, EXPERTS, D, 2 * WIDTH), scene.packed(name, EXPERTS, WIDTH, D)
    forward = kernels.bind("scaled_experts_forward", gate_up=first, down=second, limit=LIMIT)
    weight_bytes = sum((w.values.numel() + 4 * w.scales.numel()) // EXPERTS for w in (first, second))
    operations = 2 * routing.experts.numel() * 3 * D * WIDTH
    return Case(f"experts ({name})", lambda: forward(x, routing), used * weight_bytes + 4 * x.numel(), operations)


def packed_cases(kernels: Kernels, scene: Scene) -> list[Case]:
    """Rows packed to FP8 on their way to an FP8 product."""
    t, num_in, weight = scene.num_rows, GROUPS * GROUP_RANK, scene.packed("fp8", GROUPS * GROUP_RANK, D)
    x, linear = scene.half(t, num_in), kernels.bind("scaled_linear", weight=weight)
    num_bytes = weight.values.numel() + 4 * weight.scales.numel() + 2 * t * (2 * num_in + D)
    return [Case("scaled_linear (wo_b)", lambda: linear(x), num_bytes, 2 * t * num_in * D, "float8")]


def draft_cases(kernels: Kernels, scene: Scene) -> list[Case]:
    """The head of a draft, greedy and sampled, and the judging of drafts, for blocks of 5 places."""
    count, gamma, device = scene.num_requests, 5, scene.device
    weights = {name: scene.half(VOCAB, MARKOV_RANK) for name in ("w1", "w2")}
    base, anchors = scene.wide(count, gamma, VOCAB), torch.arange(count, device=device)
    draw, sample = (kernels.bind(name, **weights) for name in ("markov_greedy", "markov_sample"))
    num_bytes = gamma * (2 * VOCAB * MARKOV_RANK + 4 * count * VOCAB)
    operations = 2 * gamma * count * VOCAB * MARKOV_RANK
    noise = torch.full((count, gamma), 0.5, dtype=torch.float64, device=device)
    law = torch.full((count * (gamma + 1), VOCAB), 1 / VOCAB, dtype=torch.float64, device=device)
    lens, reject = torch.full_like(anchors, gamma), kernels.bind("reject_drafts")
    drafts, own = anchors.repeat(gamma, 1).t(), law[: count * gamma].view(count, gamma, VOCAB)
    places = (anchors * (gamma + 1), lens, drafts)
    return [
        Case("markov_greedy", lambda: draw(base, anchors), num_bytes, operations, "float32"),
        Case(
            "markov_sample",
            lambda: sample(base, anchors, noise[:, 0] + 0.5, noise),
            num_bytes + 8 * base.numel(),
            operations + 8 * base.numel(),
            "float32",
        ),
        Case(
            "reject_drafts",
            lambda: reject(law, *places, noise, noise[:, 0], own),
            2 * 8 * count * VOCAB,
            6 * count * VOCAB,
            "float32",
        ),
    ]


def ring_cases(kernels: Kernels, scene: Scene) -> list[Case]:
    """What dense models with ring attention launch for a shard of the context: DeepSeek-V3's latent attention and
    Qwen3-8B's, the merge of such blocks, and the choice of experts within groups."""
    t, keys, found = scene.num_rows, scene.context, []
    for name, (heads, key_heads, width, value_width) in {"mla": (128, 1, 576, 512), "gqa": (32, 8, 128, 128)}.items():
        q, k = scene.half(t, heads, width), scene.half(keys, key_heads, width)
        v = k[..., :value_width] if name == "mla" else scene.half(keys, key_heads, value_width)
        attend = kernels.bind("attend_block", scale=width**-0.5)
        read = keys * key_heads * (width if name == "mla" else width + value_width)
        num_bytes = 2 * (q.numel() + read) + 4 * t * heads * value_width
        operations = 2 * t * heads * keys * (width + value_width)
        call = functools.partial(attend, q, k, v, None)
        found.append(Case(f"attend_block ({name})", call, num_bytes, operations))
    side = Attended(scene.wide(t, 128, 512), scene.wide(t, 128))
    merge, route = kernels.bind("merge"), {"scoring": "sigmoid", "renormalise": True, "scale": 2.5}
    found.append(Case("merge (mla)", lambda: merge(side, side), 12 * side.out.numel(), 3 * side.out.numel(), "float32"))
    logits = scene.wide(t, EXPERTS)
    grouped = kernels.bind("route_grouped", bias=logits[0], top_k=8, num_groups=8, topk_groups=4, **route)
    found.append(Case("route_grouped", lambda: grouped(logits), 4 * logits.numel(), 40 * logits.numel(), "float32"))
    return found


FAMILIES = (row_cases, attention_cases, packed_key_cases, expert_cases, packed_cases, draft_cases, ring_cases)
