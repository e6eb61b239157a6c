"""Every layout gives the tokens of one rank: the matrix of pipeline, data, context, tensor and expert parallelism.

Examples:
  dspark bench layouts --ranks 4
  dspark bench layouts --ranks 8 --model DIR --json

Ranks are forked on this host. Five requests of odd lengths join at different steps; every layout runs them with several
chunk sizes, both splits of context parallelism, and with and without the checkpoint's draft. A line says which of a
layout's runs gave other ids than one rank did, and how long they took. Exit status 1 if any did.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...parallel.groups import Groups
from ...parallel.local import run_forked
from ...parallel.topology import Topology
from ..checkpoint import bundled_model
from ..checkpoint.placement import layout_problems
from ..cli import EXIT_FAILED, EXIT_OK, running
from ..engine_config import EngineConfig, resolve
from ..load import load_engine
from ..model_config import ModelConfig, load_model_config
from ..request import Request, SamplingParams
from . import flags
from .machine import machine_line

PROMPT_LENGTHS = (1, 37, 5, 82, 18)
WHOLE = 1 << 15  # a chunk that holds any prompt here


class Setting(NamedTuple):
    """One run of a layout."""

    draft: str
    chunk_size: int
    cp_split: str
    cp_decode: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the bundled small model)")
    parser.add_argument("--ranks", type=flags.at_least_one, default=4, metavar="N", help="most ranks (default 4)")
    parser.add_argument("--new-tokens", type=flags.at_least_one, default=24, metavar="N", help="default 24")
    parser.add_argument("--quick", action="store_true", help="fewer chunk sizes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the matrix; 1 if a layout gave other tokens than one rank."""
    folder = args.model or str(bundled_model())
    config = load_model_config(folder)
    torch.set_num_threads(1)
    if not args.json:
        print(machine_line(torch.device("cpu")))
    lines, all_same = {}, True
    with running():
        for topology in layouts(config, args.ranks):
            start = time.perf_counter()
            wrong = compare(folder, config, topology, settings(config, topology, args.quick), args.new_tokens)
            all_same &= not wrong
            name = " ".join(f"{axis}{size}" for axis, size in topology.sizes.items() if size > 1) or "one rank"
            lines[name] = {"differs": wrong, "seconds": time.perf_counter() - start}
            if not args.json:
                verdict = "same ids" if not wrong else f"DIFFERENT IDS in {wrong}"
                print(f"{name:<28} {verdict} ({lines[name]['seconds']:.1f} s)", flush=True)
    if args.json:
        print(json.dumps(lines))
    return EXIT_OK if all_same else EXIT_FAILED


def layouts(config: ModelConfig, max_ranks: int) -> Iterator[Topology]:
    """Every layout of up to ``max_ranks`` ranks that the model can be cut like, with ep 1 and tp."""
    sizes = range(1, max_ranks + 1)
    for pp in sizes:
        for dp in sizes:
            for cp in sizes:
                for attn_tp in sizes:
                    tp = dp * cp * attn_tp
                    for ep in sorted({1, tp}) if pp * tp <= max_ranks and pp <= config.num_layers else ():
                        topology = Topology(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
                        if not layout_problems(config, topology):
                            yield topology


def settings(config: ModelConfig, topology: Topology, quick: bool) -> list[Setting]:
    """The runs of one layout; the splits of context parallelism only where there is any."""
    drafts = ["none"] if config.dspark is None else ["none", "dspark"]
    chunks = (7, WHOLE) if quick else (1, 7, 64, WHOLE)
    splits = [("interleave", "split")]
    if topology.cp > 1:
        splits += [("zigzag", "split"), ("interleave", "replicate")]
    return [Setting(draft, chunk, *split) for draft in drafts for chunk in chunks for split in splits]


def compare(folder: str, config: ModelConfig, topology: Topology, runs: Sequence[Setting], num_new: int) -> list[str]:
    """The runs whose ids differ from those of one rank, by name."""
    want = generate(folder, config, Groups.single(), Setting("none", WHOLE, "interleave", "split"), num_new)

    def on_rank(rank: int) -> list[Any]:
        groups = Groups.build(topology, rank)
        return [generate(folder, config, groups, setting, num_new) for setting in runs]

    got = run_forked(on_rank, topology.world) if topology.world > 1 else [on_rank(0)]
    return [str(tuple(setting)) for i, setting in enumerate(runs) if any(rank[i] != want for rank in got)]


def generate(folder: str, config: ModelConfig, groups: Groups, setting: Setting, num_new: int) -> list[list[int]]:
    """The greedy ids of the requests, each joining two steps after the one before. Collective over the job."""
    options = EngineConfig(
        model=folder,
        max_running=len(PROMPT_LENGTHS),
        max_context=min(512, config.max_position_embeddings),
        chunk_size=setting.chunk_size,
        draft=setting.draft,
        cp_split=setting.cp_split,
        cp_decode=setting.cp_decode,
    )
    options = resolve(
        options,
        model_dir=folder,
        device_type="cpu",
        max_positions=config.max_position_embeddings,
        own_draft="none",
    )
    engine = load_engine(
        dataclasses.replace(options, dtype="float32"), groups, torch.device("cpu"), model_config=config
    )
    numbers = random.Random(7)
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    prompts = [tuple(numbers.randrange(config.vocab_size) for _ in range(length)) for length in PROMPT_LENGTHS]
    waiting = [Request(str(i), prompt, params, i) for i, prompt in enumerate(prompts)]
    ids: list[list[int]] = [[] for _ in prompts]
    steps = 0
    while waiting or engine.has_work():
        if waiting and steps % 2 == 0:
            engine.add(waiting.pop(0))
        for event in engine.step():
            ids[int(event.request_id)] += event.token_ids
        steps += 1
    return ids
