"""Reads a checkpoint's headers and config only, and says whether it can be used, and what it needs.

Examples:
  dspark check --model DIR
  dspark check --model DIR --tp 16 --ep 16 --dtype bfloat16 --max-running 32 --max-context 65536 --json

Every tensor must be there once, in the shape that config.json asks for and a format that can be read; nothing else may
be there. All problems are listed, and the exit status is then 2. Weights are counted as the layers hold them after
dequantisation; the cache is counted per rank, since ranks that share heads all hold it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import sys
from collections import Counter
from typing import Any

from ...comm.dispatch import dispatcher_class
from ...parallel.launch import detect
from ...parallel.pipeline import stage_layers
from ...parallel.topology import Topology
from ..cache import CacheLayout
from ..checkpoint import CheckpointError, Inspection, bundled_model, inspect_checkpoint
from ..checkpoint.placement import layout_problems, rank_weights
from ..cli import EXIT_OK, EXIT_USAGE
from ..draft import drafter_class, own_draft
from ..load import cache_layout, draft_rows
from ..model_config import Config, load_model_config
from ..models import family
from .engine_flags import add_kv_format
from .layout import add_layout_flags, topology_from_args

ITEM_SIZES = {"float32": 4, "bfloat16": 2}
SHOWN_RANKS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument(
        "--model", "--model-path", metavar="DIR", help="checkpoint folder (default: the bundled small model)"
    )
    parser.add_argument(
        "--dtype", choices=("auto", *ITEM_SIZES), default="auto", help="type to compute in (auto: float32, as on a CPU)"
    )
    parser.add_argument(
        "--max-running", type=int, default=1, metavar="N", help="requests in flight per DP rank (default 1)"
    )
    parser.add_argument("--max-context", type=int, metavar="N", help="tokens a request (default: the model's limit)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a report")
    add_kv_format(parser)
    add_layout_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report (rank 0 only, if ranks were started); status 2 if anything is wrong with the checkpoint."""
    info = detect()
    topology = _topology(args, None if info.launcher == "single" else info.world)
    for flag, value in (("--max-running", args.max_running), ("--max-context", args.max_context)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} is {value}; it must be at least 1")
    folder = pathlib.Path(args.model) if args.model else bundled_model()
    itemsize = ITEM_SIZES["float32" if args.dtype == "auto" else args.dtype]
    travels = dispatcher_class(args.dispatcher).all_to_all
    packed = args.kv_format == "fp8"
    report = check(folder, topology, itemsize, args.max_running, args.max_context, travels, packed)
    problems = report["problems"]
    if info.rank == 0:
        print(json.dumps(report) if args.json else "\n".join(as_text(report)))
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            print(f"dspark: error: {problems[0]}{more}", file=sys.stderr)
    return EXIT_OK if report["ok"] else EXIT_USAGE


def _topology(args: argparse.Namespace, world: int | None) -> Topology:
    """The layout of ``world`` ranks, else of as many as the flags need."""
    if world is None:
        tp = args.tp or max(math.lcm(args.dp * args.cp, (args.ep or 1) * args.moe_dp), 1)
        world = tp * args.pp
    return topology_from_args(args, world, None)


def check(
    folder: str | os.PathLike[str],
    topology: Topology,
    itemsize: int,
    num_requests: int,
    max_context: int | None,
    all_to_all: bool = False,
    packed: bool = False,
) -> dict[str, Any]:
    """The report as JSON values: ``ok``, ``problems`` and, as far as they could be found out, ``model``,
    ``parameters``, ``formats``, ``draft``, ``memory`` and ``cache``; sizes in bytes."""
    report: dict[str, Any] = {"ok": False, "folder": str(folder), "problems": []}
    try:
        config = load_model_config(folder)
    except ValueError as error:
        report["problems"] = [str(error)]
        return report
    report["model"] = _model(config)
    try:
        inspection = inspect_checkpoint(folder, config)
    except CheckpointError as error:
        report["problems"] = list(error.problems)
        return report
    report["problems"] = list(inspection.problems)
    report["parameters"] = parameter_counts(config, inspection)
    report["formats"] = number_formats(inspection)
    report["draft"] = _draft(config, inspection)
    wrong_layout = layout_problems(config, topology, all_to_all)
    report["problems"] += wrong_layout
    context = config.max_position_embeddings if max_context is None else max_context
    if context > config.max_position_embeddings:
        report["problems"].append(
            f"--max-context is {context}, but the model has {config.max_position_embeddings} positions"
        )
    if not wrong_layout:
        sizes = (itemsize, inspection.has_draft, num_requests, context, all_to_all, packed)
        report["memory"] = memory(config, topology, *sizes)
    report["ok"] = not report["problems"]
    return report


def _model(config: Config) -> dict[str, Any]:
    return {
        "model_type": config.model_type,
        "layers": config.num_layers,
        "layer_kinds": dict(Counter(family(config.model_type).layer_labels(config))),
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "head_dim": config.head_dim,
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "hash_routed_layers": config.num_hash_layers,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_position_embeddings,
    }


def _part(name: str) -> str:
    if ".ffn.experts." in name:
        return "routed experts"
    if ".ffn.shared_experts." in name:
        return "shared experts"
    if ".ffn.gate." in name:
        return "routers"
    if ".attn." in name:
        return "attention"
    if "hc_" in name:
        return "residual mixing"
    return "embedding and head" if name in ("embed.weight", "head.weight") else "norms and others"


def parameter_counts(config: Config, inspection: Inspection) -> dict[str, Any]:
    """Floating-point parameters of the target by part, those a token uses, and those of the draft."""
    parts: Counter[str] = Counter()
    draft = 0
    for name, spec in inspection.specs.items():
        if spec.kind == "table" or spec.copy_of is not None:
            continue
        count = math.prod(spec.shape)
        if spec.role == "draft":
            draft += count
        else:
            parts[_part(name)] += count
    total = sum(parts.values())
    num_idle = config.num_experts - config.num_experts_per_tok
    idle = parts["routed experts"] * num_idle // max(config.num_experts, 1)
    if "head.weight" in inspection.specs:  # else the embedding is read whole, as the head
        idle += (config.vocab_size - 1) * config.hidden_size  # a token reads one row of the embedding
    return {"target": total, "target_per_token": total - idle, "draft": draft, "by_part": dict(parts)}


def number_formats(inspection: Inspection) -> list[dict[str, Any]]:
    """One row per part of the model and number format: tensors, values, and bytes in the files with scales."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    for name, encoding in inspection.encodings.items():
        row = rows.setdefault((inspection.specs[name].role, _part(name), encoding.label), [0, 0, 0])
        row[0] += 1
        row[1] += math.prod(encoding.shape)
        row[2] += encoding.nbytes
    return [
        {"role": role, "part": part, "format": label, "tensors": tensors, "values": values, "bytes": nbytes}
        for (role, part, label), (tensors, values, nbytes) in sorted(
            rows.items(), key=lambda item: (item[0][0] == "draft", item[0])
        )
    ]


def _draft(config: Config, inspection: Inspection) -> dict[str, Any] | None:
    """What draft the config announces and whether the files hold it."""
    if config.num_draft_stages == 0:
        return None
    found = {"stages": config.num_draft_stages, "in_files": inspection.has_draft}
    if config.dspark is None:
        return {"kind": "mtp", **found}
    draft = config.dspark
    return {
        "kind": "dspark",
        **found,
        "block_size": draft.block_size,
        "target_layer_ids": list(draft.target_layer_ids),
        "noise_token_id": draft.noise_token_id,
        "markov_head": f"{draft.markov_head_type}, rank {draft.markov_rank}" if draft.markov_rank else "none",
        "confidence_head": draft.enable_confidence_head,
    }


def memory(
    config: Config,
    topology: Topology,
    itemsize: int,
    has_draft: bool,
    num_requests: int,
    max_context: int,
    all_to_all: bool = False,
    packed: bool = False,
) -> dict[str, Any]:
    """Bytes on each rank: weights, rings of a request slot, compressed entries per token, and all of it for
    ``num_requests`` requests of ``max_context`` tokens on each DP rank of attention, as an engine makes room for.

    Per token of context, a CSA layer keeps (head_dim + index_head_dim) / m numbers and an HCA layer head_dim / m; keys
    and values per head are 2 head_dim for each key head of the rank, latent attention keeps kv_lora_rank +
    qk_rope_head_dim on every rank, and index_head_dim more if it is sparse. Per request, every layer with a window
    keeps a ring of window + max_verify rows, and a compressor its inputs: 2 m + max_verify rows of 4 (head_dim +
    index_head_dim) in a CSA layer, m + max_verify rows of 2 head_dim in an HCA layer. ``packed``: keys and entries of
    the target are kept in 8-bit floats, see :mod:`~dspark.layers.kernels.packed_keys`.
    """
    draft = drafter_class(own_draft(config) if has_draft else "none")
    max_verify = 1 + draft.default_gamma(config)
    stages = [
        cache_layout(config, layers, max_verify, itemsize, topology.attn_tp, packed)
        for layers in stage_layers(config.num_layers, topology.pp)
    ]
    rows = family(config.model_type).draft_cache_rows(config, topology.attn_tp) if has_draft else ()
    own = CacheLayout(rows, draft_rows(draft, config, max_verify), itemsize)
    draft_slot = own.bytes_per_slot + own.pages_for(max_context) * own.bytes_per_page
    ranks = []
    held = rank_weights(config, topology, itemsize, with_draft=has_draft, all_to_all=all_to_all)
    for rank, weights in enumerate(held):
        stage = rank // topology.tp
        layout = stages[stage]
        per_slot = layout.bytes_per_slot + (draft_slot if stage == topology.pp - 1 else 0)
        per_request = per_slot + layout.pages_for(max_context) * layout.bytes_per_page
        cache = num_requests * per_request
        ranks.append(
            {
                "rank": rank,
                "weights": weights.target,
                "draft_weights": weights.draft,
                "cache_per_token": layout.bytes_per_token,
                "cache_per_request": per_slot,
                "cache": cache,
                "total": weights.target + weights.draft + cache,
            }
        )
    return {
        "layout": topology.sizes,
        "bytes_per_value": itemsize,
        "kv_format": "fp8" if packed else "native",
        "max_verify": max_verify,
        "requests": num_requests,
        "context": max_context,
        "cache_per_token": sum(layout.bytes_per_token for layout in stages),
        "cache_per_request": sum(layout.bytes_per_slot for layout in stages) + draft_slot,
        "page_tokens": stages[0].page_tokens,
        "ranks": ranks,
    }


def as_text(report: dict[str, Any]) -> list[str]:
    """The report for people, line by line."""
    lines = [f"checkpoint {report['folder']}"]
    if "model" in report:
        lines += _model_lines(report)
    if "memory" in report:
        lines += _memory_lines(report["memory"])
    problems = report["problems"]
    lines += [f"problem: {problem}" for problem in problems]
    lines.append("ok: every tensor is there once, in shape, and nothing else is" if not problems else "NOT usable")
    return lines


def _model_lines(report: dict[str, Any]) -> list[str]:
    model = report["model"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in model["layer_kinds"].items())
    lines = [
        f"{model['model_type']}: layers {model['layers']} ({kinds}; {model['hash_routed_layers']} routed by token id), "
        f"hidden {model['hidden_size']}, heads {model['heads']} x {model['head_dim']}, "
        f"experts {model['experts']} of which {model['experts_per_token']} a token, vocabulary {model['vocab_size']}, "
        f"positions {model['max_positions']}"
    ]
    if "parameters" in report:
        count = report["parameters"]
        lines.append(
            f"parameters {count['target']:,}, of which a token uses {count['target_per_token']:,}; "
            f"draft {count['draft']:,}"
        )
        lines += [f"  {part:<20} {number:>18,}" for part, number in count["by_part"].items()]
    draft = report.get("draft")
    if draft is not None:
        details = ", ".join(f"{key} {value}" for key, value in draft.items() if key not in ("kind", "in_files"))
        absent = "" if draft["in_files"] else "; announced, but the files hold none of it"
        lines.append(f"draft {draft['kind']}: {details}{absent}")
    if report.get("formats"):
        lines.append(f"{'role':<7} {'part':<20} {'format':<44} {'tensors':>8} {'values':>18} {'in files':>11}")
        lines += [
            f"{row['role']:<7} {row['part']:<20} {row['format']:<44} {row['tensors']:>8} {row['values']:>18,} "
            f"{_size(row['bytes']):>11}"
            for row in report["formats"]
        ]
    return lines


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    sizes = ", ".join(f"{name} {size}" for name, size in memory["layout"].items())
    keys = "" if memory["kv_format"] == "native" else f", {memory['kv_format']} keys"
    lines = [
        f"cache: {memory['cache_per_token']:,.1f} bytes a token of context, pages of {memory['page_tokens']} tokens; "
        f"rings {_size(memory['cache_per_request'])} a request (steps of up to {memory['max_verify']} rows to undo)",
        f"memory per rank ({sizes}; {memory['bytes_per_value']} bytes a value{keys}; {memory['requests']} requests of "
        f"{memory['context']} tokens):",
        f"{'rank':>6} {'weights':>11} {'draft':>11} {'cache':>11} {'total':>11}",
    ]
    ranks = memory["ranks"]
    for entry in ranks[:SHOWN_RANKS]:
        cells = (_size(entry[key]) for key in ("weights", "draft_weights", "cache", "total"))
        lines.append(f"{entry['rank']:>6} " + " ".join(f"{cell:>11}" for cell in cells))
    if len(ranks) > SHOWN_RANKS:
        most = max(ranks, key=lambda entry: entry["total"])
        lines.append(f"   ... and {len(ranks) - SHOWN_RANKS} more; most on rank {most['rank']}: {_size(most['total'])}")
    return lines


def _size(num_bytes: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} B"
