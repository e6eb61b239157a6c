"""Digests of files, to tell whether two ranks or two runs read the same."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Sequence

SAMPLED_BYTES = 1 << 16


def files_digest(paths: Sequence[str | pathlib.Path], *facts: object, num_samples: int = 64) -> str:
    """Hex digest of files, by name, and JSON-able ``facts``.

    Of files above ``num_samples`` times 64 KiB it sees the size and that many evenly spaced samples.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for path in map(pathlib.Path, paths):
        size = path.stat().st_size
        digest.update(f"\n{path.name} {size}\n".encode())
        with path.open("rb") as stream:
            if size <= SAMPLED_BYTES * num_samples:
                digest.update(stream.read())
                continue
            for sample in range(num_samples):
                stream.seek(sample * (size - SAMPLED_BYTES) // (num_samples - 1))
                digest.update(stream.read(SAMPLED_BYTES))
    return digest.hexdigest()
