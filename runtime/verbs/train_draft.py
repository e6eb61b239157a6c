"""Train a draft for a target: DSpark, DFlash, multi-token prediction (MTP-1) or EAGLE-3.

Examples:
  dspark train-draft --text code.txt.gz math.txt.gz --steps 2000 --output drafts/dspark
  dspark train-draft --text chat.jsonl --method dflash --gamma 7 --steps 2000 --output drafts/dflash
  torchrun --nproc-per-node 2 -m dspark.runtime train-draft --text chat.jsonl --steps 2000 --output drafts/dspark

The target stays as it is; its hidden states over the text are computed once and kept in --cache. A run that is started
again with the same flags goes on where it was. --output becomes a complete checkpoint (target and draft; EAGLE-3: the
draft alone), with the log and the curves in its folder "training".
"""

from __future__ import annotations

import argparse
import json
import pathlib

from ...parallel.groups import Groups
from ...parallel.launch import Limits, detect, init
from ...parallel.topology import Topology
from ..checkpoint import bundled_model
from ..engine_config import DEVICES
from ..model_config import MARKOV_HEAD_TYPES, load_model_config, only_for
from ..progress import shown, silent
from ..tokenizer import Tokenizer
from ..training.losses import LossWeights
from ..training.methods import METHODS, Recipe
from ..training.prepare import DataOptions
from ..training.run import RunOptions, train
from ..training.trainer import TrainOptions

MASK_TOKENS = ("<|mask|>", "<mask>", "[MASK]")
RANK_TIMEOUT = 3600.0  # seconds; ranks wait for each other while each runs the target over its share of the text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    number, share = {"metavar": "N", "type": int}, {"metavar": "X", "type": float}
    parser.add_argument("--model", metavar="DIR", help="the target (default: the bundled small model)")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help=".txt, .txt.gz or .jsonl documents")
    parser.add_argument("--output", required=True, metavar="DIR", help="becomes the checkpoint")
    parser.add_argument("--json", action="store_true", help="print the run's record as one JSON object")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="default: a GPU if there is one")
    parser.add_argument("--seed", **number, default=0, help="of data, weights and anchors (default 0)")
    draft = parser.add_argument_group("draft")
    draft.add_argument("--method", choices=tuple(METHODS), default="dspark", help="default dspark")
    draft.add_argument("--gamma", **number, default=7, help="tokens a block, or steps of a chain (default 7)")
    draft.add_argument(
        "--target-layer-ids",
        type=int,
        nargs="+",
        metavar="N",
        help="layers it reads, one stage each (default: the last; eagle3: three)",
    )
    draft.add_argument("--draft-experts", **number, help="its routed experts (default: at most 8 of the target's)")
    draft.add_argument("--draft-top-k", **number, help="of them per token (default: as the target)")
    draft.add_argument("--markov-rank", **number, default=256, help="of the Markov head (default 256)")
    draft.add_argument("--markov-head", choices=MARKOV_HEAD_TYPES, default="vanilla", help="default vanilla")
    draft.add_argument("--no-confidence-head", action="store_true", help="leave the confidence head out")
    draft.add_argument("--mask-token-id", **number, help=f"default: the tokenizer's {' or '.join(MASK_TOKENS)}")
    _add_data_flags(parser, number, share)
    _add_training_flags(parser, number, share)


def _add_data_flags(parser: argparse.ArgumentParser, number: dict, share: dict) -> None:
    base, group = DataOptions(()), parser.add_argument_group("data")
    group.add_argument("--cache", metavar="DIR", help="keeps target states between runs (default: in --output)")
    group.add_argument("--cache-dtype", choices=("float16", "bfloat16", "float32"), default=base.cache_dtype)
    group.add_argument(
        "--max-length", **number, default=base.max_length, help="tokens a sequence (default %(default)s)"
    )
    group.add_argument("--max-tokens", **number, help="text tokens of each file; 0: continuations only (default: all)")
    group.add_argument("--held-out", **share, default=base.held_out, help="share for evaluation (default %(default)s)")
    group.add_argument("--regenerate", **number, default=0, help="prompts of each file that the target continues")
    group.add_argument("--regenerate-tokens", **number, default=base.regenerate_tokens, help="default %(default)s")
    group.add_argument(
        "--regenerate-temperature", type=float, nargs="+", default=list(base.temperatures), metavar="X", help="in turn"
    )
    group.add_argument("--turn-token", default=base.turn_token, metavar="TEXT", help="a prompt ends behind one")


def _add_training_flags(parser: argparse.ArgumentParser, number: dict, share: dict) -> None:
    base, weights, group = TrainOptions(1, 1), LossWeights(), parser.add_argument_group("training")
    group.add_argument("--steps", **number, required=True, help="updates")
    group.add_argument("--tokens", **number, default=base.tokens, help="tokens a step, all ranks (default %(default)s)")
    group.add_argument("--anchors", **number, default=base.anchors, help="blocks a step (default %(default)s)")
    group.add_argument("--lr", **share, default=base.lr, help="peak learning rate (default %(default)s)")
    group.add_argument("--warmup", **number, default=base.warmup, help="steps (default %(default)s)")
    group.add_argument("--weight-decay", **share, default=base.weight_decay, help="default %(default)s")
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of products (default float32)"
    )
    group.add_argument("--ce-weight", **share, default=weights.ce, help="default %(default)s")
    group.add_argument("--l1-weight", **share, default=weights.l1, help="default %(default)s")
    group.add_argument("--confidence-weight", **share, default=weights.confidence, help="default %(default)s")
    group.add_argument("--loss-decay-gamma", **share, default=4.0, help="place k weighs exp(-(k-1)/X) (default 4)")
    group.add_argument("--save-every", **number, default=base.save_every, help="steps (default %(default)s)")
    group.add_argument("--eval-every", **number, default=0, help="steps; 0: at the end only")
    group.add_argument("--log-every", **number, default=base.log_every, help="steps (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train; collective over all ranks that were started."""
    options = options_from(args)
    with init(detect(), args.device, Limits(timeout=RANK_TIMEOUT)) as process:
        topology = Topology.make(process.world, nodes=process.nodes)
        group = Groups.build(topology, process.rank, journal=process.journal).world
        is_first = process.rank == 0
        record = train(options, group, process.device, shown if is_first else silent)
        if is_first:
            print(json.dumps(record) if args.json else _table(record, options.output))
    return 0


def options_from(args: argparse.Namespace) -> RunOptions:
    """The run that the flags describe. Raises ``ValueError`` for values that no run can have."""
    model = pathlib.Path(args.model) if args.model else bundled_model()
    for name, low in (("gamma", 1), ("steps", 1), ("tokens", 1), ("anchors", 1), ("max_length", 8), ("save_every", 1)):
        if getattr(args, name) < low:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed: at least {low}")
    if not 0.0 < args.held_out < 1.0:
        raise ValueError(f"--held-out is {args.held_out}; allowed: above 0 and below 1")
    if args.max_tokens == 0 and not args.regenerate:
        raise ValueError("--max-tokens 0 leaves no data without --regenerate")
    config = load_model_config(model)
    only_for(config, "deepseek_v4", "train-draft")
    experts = min(config.num_experts, 8) if args.draft_experts is None else args.draft_experts
    recipe = Recipe(
        gamma=args.gamma,
        target_layer_ids=tuple(args.target_layer_ids or METHODS[args.method].default_layers(config)),
        noise_token_id=_mask_token_id(args, model, config.bos_token_id),
        num_experts=experts,
        top_k=min(config.num_experts_per_tok, experts) if args.draft_top_k is None else args.draft_top_k,
        markov_rank=args.markov_rank,
        markov_head=args.markov_head,
        confidence=not args.no_confidence_head,
        factors=LossWeights(args.ce_weight, args.l1_weight, args.confidence_weight),
        decay_gamma=args.loss_decay_gamma,
    )
    data = DataOptions(
        text=tuple(args.text),
        max_length=args.max_length,
        max_tokens=args.max_tokens,
        held_out=args.held_out,
        regenerate=args.regenerate,
        regenerate_tokens=args.regenerate_tokens,
        temperatures=tuple(args.regenerate_temperature),
        turn_token=args.turn_token,
        cache_dtype=args.cache_dtype,
        seed=args.seed,
    )
    options = TrainOptions(
        steps=args.steps,
        gamma=args.gamma,
        seed=args.seed,
        tokens=args.tokens,
        anchors=args.anchors,
        lr=args.lr,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        save_every=args.save_every,
        log_every=args.log_every,
        eval_every=args.eval_every,
        autocast=args.dtype == "bfloat16",
    )
    output = pathlib.Path(args.output)
    cache = pathlib.Path(args.cache) if args.cache else output / "training" / "cache"
    return RunOptions(model, output, cache, args.method, recipe, data, options)


def _mask_token_id(args: argparse.Namespace, model: pathlib.Path, bos_token_id: int | None) -> int:
    if args.mask_token_id is not None:
        return args.mask_token_id
    backend = Tokenizer.load(model, bos_token_id).backend
    found = [backend.token_to_id(token) for token in MASK_TOKENS if backend.token_to_id(token) is not None]
    if not found:
        raise ValueError(f"{model}: the tokenizer has none of {', '.join(MASK_TOKENS)}; choose a --mask-token-id")
    return found[0]


def _table(record: dict, output: pathlib.Path) -> str:
    """Held-out acceptance by source, for people."""
    lines = [f"{record['method']}: {record['steps']} steps, written to {output}", ""]
    lines.append(
        f"{'held-out text':<16}{'greedy':>8}{'sampled':>9}   accepted length; then sampled acceptance by place"
    )
    for source, found in record["held_out"].items():
        places = " ".join(f"{share:.2f}" for share in found["overlap"])
        lines.append(f"{source:<16}{found['greedy_length']:>8.2f}{found['expected_length']:>9.2f}   {places}")
    return "\n".join(lines)
