"""Flags that the benchmarks with a model share, and the session and prompts they ask for."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from ...layers.kernels import choose
from ...parallel.launch import detect
from ...parallel.topology import Topology
from ..checkpoint import bundled_model
from ..engine_config import DEVICES, DTYPES, KERNELS, EngineConfig
from ..model_config import Config, load_model_config
from ..progress import shown
from ..session import Session
from .picture import check_picture
from .prompts import Prompts, builtin_prompts, prompts_from_file


def at_least_one(text: str) -> int:
    """An argument that is a number of at least 1."""
    value = int(text) if text.strip().isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """An argument that is one or several different numbers of at least 1, with commas."""
    values = tuple(at_least_one(part) for part in text.split(","))
    if len(set(values)) != len(values):
        raise argparse.ArgumentTypeError(f"{text!r} names a number twice")
    return values


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add the model's flags and the forms of the result."""
    parser.add_argument(
        "--model", "--model-path", metavar="DIR", help="checkpoint folder (default: the bundled small model)"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="default: a GPU if there is one")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: float32 on CPU, else bfloat16")
    parser.add_argument("--kernels", choices=KERNELS, default="auto", help="default: compiled ones where they can run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--picture", metavar="FILE.png", help="also draw the figures (needs matplotlib)")


def add_speed_flags(parser: argparse.ArgumentParser) -> None:
    """Add what only benchmarks of speed need: ``--prompts``, ``--threads`` and ``--deterministic``."""
    parser.add_argument("--threads", type=at_least_one, default=1, metavar="N", help="threads on the CPU (default 1)")
    parser.add_argument(
        "--deterministic", action="store_true", help="kernels whose results do not depend on batch composition"
    )
    parser.add_argument(
        "--prompts", metavar="FILE.jsonl", help='lines with "prompt" or "token_ids" (default: built-in texts)'
    )


def check_output(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` for a picture that cannot be drawn."""
    check_picture(args.picture)


def model_of(args: argparse.Namespace) -> tuple[pathlib.Path, Config]:
    """The checkpoint folder and its config. Raises ``ValueError`` naming what is wrong with it."""
    folder = pathlib.Path(args.model) if args.model else bundled_model()
    return folder, load_model_config(folder)


def open_alone(args: argparse.Namespace, **options: object) -> Session:
    """A session of one rank, without a draft unless ``options`` has one; they are further :class:`EngineConfig` fields.

    Raises ``ValueError`` if a launcher started several ranks: the figures are of one.
    """
    world = detect().world
    if world != 1:
        raise ValueError(f"this benchmark measures one rank, but {world} were started; run it without a launcher")
    config = EngineConfig(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        kernels=args.kernels,
        deterministic=args.deterministic,
        **({"draft": "none"} | options),
    )

    def make_topology(world: int, nodes: Sequence[int] | None) -> Topology:
        return Topology.make(world, nodes=nodes)

    return Session.open(config, make_topology, shown)


def measured(session: Session) -> str:
    """What is measured, in words."""
    config = session.config
    device = session.process.device
    kernels = choose(device, session.engine.cache.layers[0].window.dtype, choice=config.kernels).backend
    name = pathlib.Path(config.model).name
    kind = f"deterministic {kernels}" if config.deterministic else kernels
    draft = "without a draft" if config.draft == "none" else f"with the draft {config.draft}"
    return f"dspark {draft}, {name}, {config.dtype} on {config.device}, {kind} kernels"


def prompts_of(args: argparse.Namespace, session: Session, num_random: int) -> Prompts:
    """The prompts of ``--prompts``, or built-in ones (of ``num_random`` random ids without a tokenizer)."""
    encode = session.encode if session.tokenizer is not None else None
    if args.prompts:
        return prompts_from_file(args.prompts, encode, session.vocab_size)
    return builtin_prompts(encode, session.vocab_size, num_random)
