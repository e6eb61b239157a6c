"""The table of attention kinds: what it says of each, and that each can be timed."""

import json

from dspark.runtime.cli import main


def test_kinds(capsys):
    assert main(["bench", "kinds", "--contexts", "48", "--repeats", "1", "--json"]) == 0
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    nsa, gqa = kinds["nsa"], kinds["gqa"]
    assert nsa["bytes_per_token"] == 2 * 2 * 4 * 128 * (1 + 1 / 16) and gqa["bytes_per_token"] == 2 * 2 * 8 * 128
    shares = {name: one["keys_read_share"]["65536"] for name, one in kinds.items()}
    assert shares["mha"] == shares["mla"] == 1.0 and shares["dsa"] == 2048 / 65536
    assert shares["nsa"] == (4095 + 1024 + 512) / 65536
    assert shares["csa"] == (512 + 128) / 65536 and shares["hca"] == (512 + 128) / 65536
    assert nsa["operations_per_token"]["65536"] == 4 * 64 * 128 * (4095 + 1024 + 512)
    for name, one in kinds.items():
        assert bool(one["milliseconds"]) == (name not in ("csa", "hca", "sliding"))
