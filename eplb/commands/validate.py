"""Check a map before an engine loads it: sizes, numbers, missing experts, second copies, and a model's own sizes.

Status 2 if anything would make an engine fail or compute something wrong; --strict also refuses wasted slots.

Example: dspark eplb validate --map map.json --gpus 32 --model /models/DeepSeek-V4-Flash
"""

from __future__ import annotations

import argparse
import json

from ..files import read_map
from .flags import add_deployment_flags, add_output_flags, model_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument("file", nargs="?", metavar="MAP", help="the map to check")
    parser.add_argument("--map", metavar="MAP", help="the same")
    add_deployment_flags(parser, required=False)
    parser.add_argument("--experts", type=int, metavar="E", help="experts of a layer")
    parser.add_argument("--num-layers", type=int, metavar="L", help="layers that the map must have")
    parser.add_argument("--model", metavar="DIR", help="a checkpoint folder or config.json to take both from")
    parser.add_argument("--strict", action="store_true", help="a second copy of an expert on a GPU is an error too")
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Check; returns 0, and raises ``ValueError`` for the first thing that is wrong."""
    model = model_of(args)
    name = args.map or args.file
    if name is None or (args.map and args.file):
        raise ValueError("one map is checked: give --map MAP")
    found = read_map(name)
    experts = args.experts or (model.num_experts if model else None)
    placement = found.placement(args.gpus, args.nodes, args.groups, experts)
    placement.check_groups()
    layers = args.num_layers or (model.num_layers if model else None)
    if layers is not None and layers != placement.num_layers:
        raise ValueError(f"the map has {placement.num_layers} layers, the model {layers}")
    wasted = placement.num_duplicates
    if args.strict and wasted.any():
        layer = int(wasted.argmax())
        raise ValueError(f"layer {layer} has {wasted[layer]} slots with a second copy of an expert on the same GPU")
    shape = placement.shape
    result = {
        "valid": True,
        "num_layers": placement.num_layers,
        "num_experts": shape.num_experts,
        "num_slots": shape.num_slots,
        "num_redundant": shape.num_redundant,
        "num_gpus": shape.num_gpus,
        "slots_per_gpu": shape.slots_per_gpu,
        "wasted_slots": int(wasted.sum()),
    }
    text = (
        f"{name} is valid: {placement.num_layers} layers x {shape.num_experts} experts in {shape.num_slots} slots "
        f"on {shape.num_gpus} GPUs"
    )
    if wasted.any():
        text += f"; {int(wasted.sum())} slots hold a second copy of an expert on the same GPU"
    print(json.dumps(result) if args.json else text)
    return 0
