"""Broken files for every reader of files that others made: each must be read, or refused with an error that says why.

    python scripts/fuzz_readers.py --cases 100000 --seed 1 --memory-mib 2048

A case is a good file in which a few bytes, or a few values of its JSON, were changed. It fails if the reader raises
anything but ``ValueError`` or ``OSError``, takes more than ten seconds of processor time, or needs more memory than
the cap (address space beyond what the process had before). A failing file is kept and its name printed; the exit
status is then 1.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import pathlib
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from dspark.eplb.files.loads import read_loads
from dspark.eplb.files.maps import read_map
from dspark.parallel.slurm import expand_counts, expand_hosts
from dspark.runtime.checkpoint import bundled_model, inspect_checkpoint
from dspark.runtime.inputs import requests_from_file, sequences_from_file
from dspark.runtime.model_config import load_model_config
from dspark.runtime.request import SamplingParams
from dspark.runtime.results_file import read_earlier
from dspark.runtime.spec.sps import load_table
from dspark.runtime.spec.sts import load_temperatures
from dspark.runtime.tokenizer import Tokenizer

SECONDS = 10
WORDS = (
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"18446744073709551616",
    b'"\\ud800"',
    b"[[[[",
    b"{}",
    b'"',
    b",",
    b"\0",
    b"\xff",
)
VALUES = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    0.5,
    1e308,
    math.inf,
    math.nan,
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
)


class Reader(NamedTuple):
    """A reader with good files for it; ``read(path)`` is given a broken one of the same name."""

    files: dict[str, bytes]
    read: Callable[[pathlib.Path], Any]


def readers() -> dict[str, Reader]:
    """Every reader of files that come from elsewhere, by name."""
    model, base = bundled_model(), SamplingParams()
    config = json.loads((model / "config.json").read_bytes())
    header = safetensors({"input_ids": ("I64", [2, 3], np.arange(6, dtype="<i8").tobytes())})
    jsonl = b'{"id": "a", "prompt": "x", "temperature": 0.5, "stop": ["y"]}\n{"token_ids": [1, 2], "top_k": 3}\n'
    results = b'{"id": "a", "prompt_tokens": 3}\n{"id": "b", "prompt_tokens": 1}\n'
    sglang = json.dumps({"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]]}).encode()
    counts = [[[1, 2, 3, 4], [4, 3, 2, 1]]] * 2
    packed, array = io.BytesIO(), io.BytesIO()
    np.savez(packed, load=np.array(counts))
    np.savez(
        array, physical_to_logical_map=np.array([[0, 1, 1, 0]]), num_experts=2, num_gpus=2, num_nodes=1, num_groups=1
    )
    torch_file = io.BytesIO()
    torch.save({"logical_count": torch.tensor(counts)}, torch_file)
    small = {"model.safetensors": safetensors({"a.weight": ("F32", [2, 2], bytes(16)), "b": ("BF16", [4], bytes(8))})}
    index = {
        "metadata": {},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    trt = b"num_slots: 4\nlayer_updates_per_iter: 1\ninitial_global_assignments:\n  0: [0, 1, 2, 3]\n"
    vllm = (
        b'{"record_type": "eplb_initial_mapping", "version": 1, "num_slots": 3, "num_redundant_experts": 1, '
        b'"initial_global_assignments": {"0": [0, 1, 1]}}\n'
    )
    return {
        "config": Reader({"config.json": json.dumps(config).encode()}, lambda p: load_model_config(p.parent)),
        "headers": Reader(small, lambda p: inspect_checkpoint(p.parent, load_model_config(model))),
        "index": Reader(
            {"model.safetensors.index.json": json.dumps(index).encode()},
            lambda p: inspect_checkpoint(p.parent, load_model_config(model)),
        ),
        "tokenizer": Reader({"tokenizer.json": tokenizer(model)}, lambda p: Tokenizer.load(p.parent, 0).encode("ab")),
        "requests": Reader({"in.jsonl": jsonl}, lambda p: requests_from_file(p, base, lambda text: (1,))),
        "sequences": Reader(
            {"in.safetensors": header, "in.jsonl": b'{"token_ids": [1, 2]}\n{"token_ids": [3]}\n'},
            lambda p: sequences_from_file(p, 99, 9),
        ),
        "results": Reader({"out.jsonl": results}, lambda p: read_earlier(p, ["a", "b"])),
        "maps": Reader({"m.json": sglang, "m.npz": array.getvalue(), "m.yaml": trt, "m.jsonl": vllm}, read_map),
        "loads": Reader(
            {
                "l.json": json.dumps({"logical_count": counts}).encode(),
                "l.csv": b"layer,expert,count\n0,0,5\n0,1,7\n1,0,2\n1,1,3\n",
                "l.npz": packed.getvalue(),
                "l.pt": torch_file.getvalue(),
            },
            lambda p: read_loads([p]),
        ),
        "speeds": Reader({"sps.json": b'{"batch_tokens": [1, 8], "steps_per_sec": [9.0, 5.0]}'}, load_table),
        "temperatures": Reader({"sts.json": b'{"temperatures": [1.0, 0.9]}'}, lambda p: load_temperatures(p, 2)),
        "hosts": Reader({"hosts": b"a[01-03,7],b2"}, lambda p: expand_hosts(p.read_bytes().decode())),
        "counts": Reader({"counts": b"8(x2),4"}, lambda p: expand_counts(p.read_bytes().decode())),
    }


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A file of that format: (dtype, shape, bytes) by name."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tokenizer(model: pathlib.Path) -> bytes:
    """The bundled tokenizer, cut down to what decodes in no time."""
    value = json.loads((model / "tokenizer.json").read_bytes())
    value["model"]["vocab"] = dict(list(value["model"]["vocab"].items())[:300])
    value["model"]["merges"] = []
    return json.dumps(value).encode()


def mutate(data: bytes, draw: random.Random) -> bytes:
    """``data`` with one to four changes."""
    for _ in range(draw.randint(1, 4)):
        changed = change_json(data, draw) if draw.random() < 0.5 else None
        data = change_bytes(data, draw) if changed is None else changed
    return data


def change_bytes(data: bytes, draw: random.Random) -> bytes:
    """One change without regard to what the bytes mean."""
    place, length = draw.randint(0, len(data)), draw.choice((1, 1, 2, 8, 64))
    kind = draw.randrange(5)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + draw.randbytes(length) + data[place + length :]
    if kind == 2:
        return data[:place] + draw.choice(WORDS) + data[place:]
    if kind == 3:
        return data[:place] + data[place + length :]
    return data[:place] + data[max(place - length, 0) : place] * draw.choice((2, 9)) + data[place:]


def change_json(data: bytes, draw: random.Random) -> bytes | None:
    """One value or key of the JSON in ``data`` changed: of all of it, a line, or a safetensors header."""
    start, stop = 0, len(data)
    if len(data) > 8 and data[8:9] == b"{":
        start, stop = 8, min(8 + struct.unpack("<Q", data[:8])[0], len(data))
    elif b"}\n" in data:
        lines = data.splitlines(keepends=True)
        chosen = draw.randrange(len(lines))
        start = sum(map(len, lines[:chosen]))
        stop = start + len(lines[chosen])
    try:
        value = json.loads(data[start:stop])
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, (dict, list)):
        return None
    text = json.dumps(change_value(value, draw)).encode() + (b"\n" if data[stop - 1 : stop] == b"\n" else b"")
    length = struct.pack("<Q", len(text)) if start == 8 else data[:start]
    return length + text + data[stop:]


def change_value(value: Any, draw: random.Random) -> Any:
    """A copy of ``value`` in which something at any depth is another thing, gone, or there twice."""
    value = here = copy.deepcopy(value)
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            return draw.choice(VALUES) if here is value else value
        key = draw.choice(keys)
        if isinstance(here[key], (dict, list)) and here[key] and draw.random() < 0.8:
            here = here[key]
            continue
        kind = draw.randrange(4)
        if kind == 0:
            del here[key]
        elif kind == 1 and isinstance(here, dict):
            here[draw.choice(("", "x", "\ud800", str(key) * 2))] = here.pop(key)
        elif kind == 2 and isinstance(here, list):
            here.insert(key, copy.deepcopy(here[draw.choice(keys)]))
        else:
            here[key] = draw.choice(VALUES)
        return value


def run_case(reader: Reader, draw: random.Random, folder: pathlib.Path) -> str:
    """Reads one broken file in ``folder``, as :func:`read_case`."""
    name = draw.choice(sorted(reader.files))
    return read_case(reader, folder / name, mutate(reader.files[name], draw))


def read_case(reader: Reader, path: pathlib.Path, data: bytes) -> str:
    """Reads ``data`` as the file ``path``; "read" or "refused". Anything else is raised."""
    path.write_bytes(data)
    try:
        reader.read(path)
    except (ValueError, OSError) as error:
        assert str(error), f"{type(error).__name__} says nothing"
        return "refused"
    return "read"


def too_long(number: int, frame: object) -> None:
    """The case used up its time."""
    raise TookTooLong(f"more than {SECONDS} s")


class TookTooLong(Exception):
    """A reader took too long; no ``OSError``, which would pass for a refusal."""


def main() -> int:
    """Run the cases and print a table of what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-mib", type=int, default=2048, help="address space a case may need on top")
    args = parser.parse_args()
    every, counts, slowest = readers(), Counter(), 0.0
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (args.memory_mib << 20),) * 2)
    signal.signal(signal.SIGPROF, too_long)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for case in range(args.cases):
            name = sorted(every)[case % len(every)]
            folder = pathlib.Path(scratch) / name
            folder.mkdir(exist_ok=True)
            start = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                outcome = run_case(every[name], random.Random(f"{args.seed} {case}"), folder)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcome, failed = "FAILED", failed + 1
                kept = pathlib.Path(tempfile.gettempdir()) / f"fuzz-{name}-{args.seed}-{case}"
                kept.write_bytes(b"\n".join(file.read_bytes() for file in folder.iterdir()))
                print(f"case {case}, {name}, kept as {kept}:", file=sys.stderr)
                traceback.print_exc(limit=-4)
            signal.setitimer(signal.ITIMER_PROF, 0)
            counts[name, outcome] += 1
            slowest = max(slowest, time.process_time() - start)
            for file in folder.iterdir():
                file.unlink()
    print(f"{'reader':<14}{'read':>9}{'refused':>9}{'FAILED':>9}")
    for name in sorted(every):
        print(f"{name:<14}" + "".join(f"{counts[name, outcome]:>9}" for outcome in ("read", "refused", "FAILED")))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{args.cases} cases, slowest {slowest:.2f} s, peak resident memory {peak} MiB, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
