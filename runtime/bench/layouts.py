"""Every layout gives the tokens of one rank: the matrix of pipeline, data, context, tensor and expert parallelism.

Examples:
  dspark bench layouts --ranks 4
  dspark bench layouts --ranks 8 --model DIR --model DIR --json
  dspark bench layouts --only "tp16 dp2 cp4 ep16"

Ranks are forked on this host. Five requests of odd lengths join at different steps; every layout runs them with several
chunk sizes, both splits of context parallelism, and with and without the checkpoint's draft. A line says which of a
layout's runs gave other ids than one rank did, and how long they took. Exit status 1 if any did.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...comm.dispatch import dispatcher_class
from ...parallel.groups import Groups
from ...parallel.local import run_forked
from ...parallel.topology import Topology
from ..checkpoint import bundled_model
from ..checkpoint.placement import layout_problems
from ..cli import EXIT_FAILED, EXIT_OK, running
from ..engine import Engine
from ..engine_config import DISPATCHERS, OVERLAP_MODES, EngineConfig, resolve
from ..load import load_engine
from ..model_config import Config, load_model_config
from ..request import Request, SamplingParams
from . import flags
from .machine import machine_line
from .systems import sibling

PROMPT_LENGTHS = (1, 37, 5, 82, 18)
SHORT_LENGTHS = (1, 19, 5, 31, 8)  # where a step has room for one prompt token
WHOLE = 1 << 15  # a chunk that holds any prompt here


Ids = dict[tuple[int, ...], list[list[int]]]
"""The new tokens of every request, by the lengths of the prompts."""


class Setting(NamedTuple):
    """One run of a layout."""

    draft: str
    chunk_size: int
    cp_split: str = "interleave"
    cp_decode: str = "split"
    dispatcher: str = "standard"
    overlap: str = "none"

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Of the five requests."""
        return SHORT_LENGTHS if self.chunk_size == 1 else PROMPT_LENGTHS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--model", action="append", metavar="DIR", help="checkpoint folder; repeatable (default: the bundled model)"
    )
    parser.add_argument("--ranks", type=flags.at_least_one, default=4, metavar="N", help="most ranks (default 4)")
    parser.add_argument(
        "--only", action="append", type=layout, metavar="LAYOUT", help='such a layout, as "tp4 pp2 cp2"; repeatable'
    )
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N", help="every N-th layout, from the K-th on")
    parser.add_argument("--new-tokens", type=flags.at_least_one, default=16, metavar="N", help="default 16")
    parser.add_argument("--quick", action="store_true", help="fewer chunk sizes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def layout(text: str) -> Topology:
    """An argument that names the sizes of a layout, as the output does."""
    sizes = re.findall(r"(tp|pp|dp|cp|ep)(\d+)", text)
    if not sizes or " ".join(axis + size for axis, size in sizes) != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a layout such as 'tp4 pp2 cp2'")
    try:
        return Topology(**{axis: int(size) for axis, size in sizes})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def part(text: str) -> tuple[int, int]:
    """An argument K/N."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 1/4")
    return int(found[1]), int(found[2])


def run(args: argparse.Namespace) -> int:
    """Run the matrix; 1 if a layout gave other tokens than one rank."""
    torch.set_num_threads(1)
    if not args.json:
        print(machine_line(torch.device("cpu")))
    lines, all_same = {}, True
    configs = {folder: load_model_config(folder) for folder in args.model or [str(bundled_model())]}
    for folder, config in configs.items():
        check(folder, config, args.only or [])
    with running():
        for folder, config in configs.items():
            wanted = one_rank(folder, config, args.new_tokens)
            chosen = args.only or sorted(layouts(config, args.ranks), key=lambda topology: topology.world)
            for topology in chosen[args.part[0] - 1 :: args.part[1]]:
                start = time.perf_counter()
                runs = settings(config, topology, args.quick)
                wrong = compare(folder, config, topology, runs, args.new_tokens, wanted)
                all_same &= not wrong
                name = f"{pathlib.Path(folder).name} {name_of(topology)}"
                lines[name] = {"differs": wrong, "runs": len(runs), "seconds": time.perf_counter() - start}
                if not args.json:
                    verdict = f"same ids in {len(runs)} runs" if not wrong else f"DIFFERENT IDS in {wrong}"
                    print(f"{name:<40} {verdict} ({lines[name]['seconds']:.1f} s)", flush=True)
    if args.json:
        print(json.dumps(lines))
    return EXIT_OK if all_same else EXIT_FAILED


def check(folder: str, config: Config, chosen: Sequence[Topology]) -> None:
    """Raise ``ValueError`` for a layout that the model cannot be cut like."""
    for topology in chosen:
        problems = layout_problems(config, topology, with_draft=False)
        if problems:
            raise ValueError(f"{folder} as {name_of(topology)}: {'; '.join(problems)}")


def name_of(topology: Topology) -> str:
    """The sizes above one."""
    return " ".join(f"{axis}{size}" for axis, size in topology.sizes.items() if size > 1) or "one rank"


def layouts(config: Config, max_ranks: int) -> Iterator[Topology]:
    """Every layout of up to ``max_ranks`` ranks that the model can be cut like."""
    sizes = range(1, max_ranks + 1)
    for pp in sizes:
        for dp in sizes:
            for cp in sizes:
                for attn_tp in sizes:
                    tp = dp * cp * attn_tp
                    fits = pp * tp <= max_ranks and pp <= config.num_layers
                    for ep, moe_dp in expert_cuts(pp, cp, tp) if fits else ():
                        topology = Topology(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, moe_dp=moe_dp)
                        if not layout_problems(config, topology, with_draft=False):
                            yield topology


def expert_cuts(pp: int, cp: int, tp: int) -> list[tuple[int, int]]:
    """Every (ep, moe_dp) of a layout."""
    cuts = [(ep, 1) for ep in range(1, tp + 1) if tp % ep == 0]
    if cp > 1 and pp == 1:
        cuts += [(ep, cp) for ep in sorted({1, tp // cp})]
    return cuts


def settings(config: Config, topology: Topology, quick: bool) -> list[Setting]:
    """The runs of one layout; the splits of context parallelism and the dispatchers only where there is any choice,
    the draft where it fits."""
    has_draft = config.dspark is not None and not layout_problems(config, topology)
    drafts = ["none", "dspark"] if has_draft else ["none"]
    kinds = [name for name in DISPATCHERS if topology.ep > 1 or not dispatcher_class(name).all_to_all]
    modes = OVERLAP_MODES if topology.tp > 1 else ("none",)
    pairs = [(name, mode) for name in kinds for mode in modes if (name, mode) != ("standard", "none")]
    if quick:
        pairs = [pair for pair in pairs if pair in (("auto", "tbo"), ("normal", "sbo"), ("standard", "tbo"))]
    moved = [Setting(draft, 7, dispatcher=name, overlap=mode) for draft in drafts for name, mode in pairs]
    if quick:
        moved = moved[-len(pairs) :]
    if topology.moe_tp > 1 < topology.ep or topology.moe_dp > 1:  # beside ep 1 and ep tp, only the experts differ
        return [Setting(draft, 7) for draft in drafts] + moved
    chunks = (7, WHOLE) if quick else (1, 7, 64, WHOLE)
    splits = ["interleave", "zigzag"] if topology.cp > 1 else ["interleave"]
    runs = [Setting(draft, chunk, split, "split") for draft in drafts for chunk in chunks for split in splits]
    if topology.cp > 1:
        runs += [Setting(draft, chunks[-2], "interleave", "replicate") for draft in drafts]
        splits = (("zigzag", "split"), ("interleave", "replicate")) if "auto" in kinds else ()
        moved += [Setting(drafts[-1], 7, *split, "auto", "tbo") for split in splits]
    return runs + moved


def compare(
    folder: str,
    config: Config,
    topology: Topology,
    runs: Sequence[Setting],
    num_new: int,
    wanted: Ids,
) -> list[str]:
    """The runs whose ids differ from ``wanted`` on some rank, by name."""

    def on_rank(rank: int) -> list[Any]:
        groups = Groups.build(topology, rank)
        kinds = sorted({(run.draft, run.dispatcher) for run in runs})
        engines = {kind: open_engine(folder, config, groups, *kind) for kind in kinds}
        return [generate(engines[run.draft, run.dispatcher], run, run.prompt_lengths, num_new) for run in runs]

    got = run_forked(on_rank, topology.world) if topology.world > 1 else [on_rank(0)]
    want = [wanted[run.prompt_lengths] for run in runs]
    return [str(tuple(run)) for i, run in enumerate(runs) if any(rank[i] != want[i] for rank in got)]


def one_rank(folder: str, config: Config, num_new: int) -> Ids:
    """What one rank without a draft makes of whole prompts."""
    alone, plain = open_engine(folder, config, Groups.single(), "none", "standard"), Setting("none", WHOLE)
    return {lengths: generate(alone, plain, lengths, num_new) for lengths in (PROMPT_LENGTHS, SHORT_LENGTHS)}


def open_engine(folder: str, config: Config, groups: Groups, draft: str, dispatcher: str) -> Engine:
    """An engine in float32 with room for all requests. Collective over the job."""
    options = resolve(
        EngineConfig(
            model=folder,
            max_running=len(PROMPT_LENGTHS),
            max_context=min(512, config.max_position_embeddings),
            draft=draft,
            dispatcher=dispatcher,
        ),
        model_dir=folder,
        device_type="cpu",
        max_positions=config.max_position_embeddings,
        own_draft="none",
    )
    options = dataclasses.replace(options, dtype="float32")
    return load_engine(options, groups, torch.device("cpu"), model_config=config)


def generate(weights: Engine, setting: Setting, prompt_lengths: Sequence[int], num_new: int) -> list[list[int]]:
    """The greedy ids of requests of such lengths, each joining two steps after the one before it. Collective over the
    job.

    ``weights``: an engine with the setting's draft; what it runs itself does not matter.
    """
    chunks = {"chunk_size": setting.chunk_size, "mixed_chunk": setting.chunk_size}
    changes = chunks | {"cp_split": setting.cp_split, "cp_decode": setting.cp_decode}
    changes |= {"overlap": setting.overlap, "overlap_min_rows": 1}
    engine, vocab_size = sibling(weights, **changes), weights.model.config.vocab_size
    numbers = random.Random(7)
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    prompts = [tuple(numbers.randrange(vocab_size) for _ in range(length)) for length in prompt_lengths]
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
