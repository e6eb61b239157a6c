"""Broken files for every reader, led by coverage: what reaches new code is kept and broken further.

    pip install 'dspark[fuzz]'
    python scripts/fuzz_atheris.py --runs 10000                    # each reader, one after the other
    python scripts/fuzz_atheris.py --only maps --runs 1000000 --corpus corpus

The readers, their good files and the changes that know JSON are those of ``fuzz_readers.py``; atheris (libFuzzer) adds
changes of its own and chooses what to change. A case fails as there: by any error but ``ValueError`` or ``OSError``,
by ten seconds, or by memory above the cap. The input that did it is kept as a file, and the status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import atheris


@contextlib.contextmanager
def instrumented() -> Iterator[None]:
    """Modules of dspark that are imported inside are traced; atheris would name each of them on stderr."""
    with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["dspark"]):
        yield


with instrumented():
    import fuzz_readers

MAX_BYTES = 1 << 14


def fuzz(reader: fuzz_readers.Reader, corpus: pathlib.Path, options: list[str]) -> None:
    """Run libFuzzer with ``options`` in this process, which it ends. The first byte of an input chooses the file."""
    names, scratch = sorted(reader.files), tempfile.TemporaryDirectory()
    for number, name in enumerate(names):
        (corpus / f"good-{name}").write_bytes(bytes([number]) + reader.files[name])
        with instrumented():  # what is imported only when a file is read
            fuzz_readers.read_case(reader, pathlib.Path(scratch.name) / name, reader.files[name])

    def one(data: bytes) -> None:
        if data:
            name = names[data[0] % len(names)]
            fuzz_readers.read_case(reader, pathlib.Path(scratch.name) / name, data[1:])

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if len(data) < 2 or draw.random() < 0.5:
            return atheris.Mutate(data, max_size)
        return (data[:1] + fuzz_readers.mutate(data[1:], draw))[:max_size]

    atheris.Setup([sys.argv[0], str(corpus), *options], one, custom_mutator=change)
    atheris.Fuzz()


def start(name: str, args: argparse.Namespace) -> tuple[int, dict[str, str]]:
    """Fuzz one reader in a process of its own: its status, and what libFuzzer counted."""
    command = [sys.executable, __file__, "--in-this-process", "--only", name, "--runs", str(args.runs)]
    command += ["--memory-mib", str(args.memory_mib), "--seed", str(args.seed)]
    command += ["--corpus", str(pathlib.Path(args.corpus) / name)] if args.corpus else []
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    found = dict(re.findall(r"^stat::(\w+): +(\d+)", done.stderr, re.MULTILINE))
    reached = re.findall(r"cov: (\d+)", done.stderr)
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
    return done.returncode, found | {"reached": reached[-1] if reached else "0"}


def main() -> int:
    """Fuzz the readers and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = fuzz_readers.readers()
    parser.add_argument("--only", choices=sorted(every), help="one reader (default: each)")
    parser.add_argument("--runs", type=int, default=10_000, help="cases a reader")
    parser.add_argument("--seed", type=int, default=1, help="above 0: the same cases again, with an empty corpus")
    parser.add_argument("--memory-mib", type=int, default=2048, help="resident memory a reader may take")
    parser.add_argument("--corpus", metavar="DIR", help="where inputs that reached new code are kept for the next time")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_this_process:
        with tempfile.TemporaryDirectory() as scratch:
            corpus = pathlib.Path(args.corpus or scratch)
            corpus.mkdir(parents=True, exist_ok=True)
            options = [f"-runs={args.runs}", f"-seed={args.seed}", f"-max_len={MAX_BYTES}", "-print_final_stats=1"]
            limits = [f"-timeout={fuzz_readers.SECONDS}", f"-rss_limit_mb={args.memory_mib}"]
            fuzz(every[args.only], corpus, [*options, *limits, f"-artifact_prefix={tempfile.gettempdir()}/fuzz-"])
    failed = 0
    print(f"{'reader':<14}{'cases':>9}{'places reached':>16}{'kept':>7}{'peak MiB':>10}  outcome", flush=True)
    for name in [args.only] if args.only else sorted(every):
        status, found = start(name, args)
        failed += status != 0
        counts = (found.get("number_of_executed_units", "?"), found["reached"], found.get("new_units_added", "?"))
        peak, outcome = found.get("peak_rss_mb", "?"), "FAILED" if status else "none failed"
        print(f"{name:<14}{counts[0]:>9}{counts[1]:>16}{counts[2]:>7}{peak:>10}  {outcome}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
