"""Requests go where their prefix is, unless that rank has more to do than the prefix saves."""

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.bench.layouts import open_engine
from dspark.runtime.bench.systems import sibling
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.homes import PrefixHomes
from dspark.runtime.model_config import load_model_config
from dspark.runtime.request import Request, SamplingParams

A, B, C = ([number] * 12 for number in (1, 2, 3))


def test_a_known_prefix_is_worth_its_tokens():
    homes = PrefixHomes(page_tokens=4, num_pages=8, num_ranks=2)
    assert homes.place(A + [9], [(0, 0), (0, 0)]) == 0
    assert homes.place(B + [9], [(13, 1), (0, 0)]) == 1
    assert homes.place(A + [8, 8], [(13, 1), (13, 1)]) == 0
    assert homes.place(B + [8, 8], [(13, 1), (13, 1)]) == 1
    # three pages of four tokens are known on rank 1, one less of the first page and its last token
    assert homes.place(B + [7], [(13, 1), (24, 1)]) == 1
    assert homes.place(B + [7], [(13, 1), (26, 1)]) == 0
    assert homes.place(A[:4], [(5, 1), (4, 1)]) == 1, "the last token is always computed, so no page of four is saved"
    assert homes.place([5] + A, [(5, 1), (4, 1)]) == 1, "the same tokens elsewhere in a prompt are no prefix"


def test_old_pages_are_forgotten():
    homes = PrefixHomes(page_tokens=4, num_pages=3, num_ranks=2)
    assert homes.place(A + [9], [(0, 0), (100, 0)]) == 0
    assert homes.place(A + [9], [(12, 0), (1, 0)]) == 0
    assert homes.place(C + [9], [(0, 0), (100, 0)]) == 0
    assert homes.place(A + [9], [(12, 0), (1, 0)]) == 1


@pytest.mark.parametrize("sizes", [{"tp": 2, "dp": 2}])
def test_prefixes_are_found_again_on_their_rank(sizes, run_ranks):
    """Two system prompts over two DP ranks: every later request finds its own, and ids are those without a cache."""
    folder = str(bundled_model())
    config = load_model_config(folder)
    numbers = torch.Generator().manual_seed(0)
    heads = torch.randint(0, config.vocab_size, (2, 300), generator=numbers).tolist()
    tails = torch.randint(0, config.vocab_size, (6, 5), generator=numbers).tolist()
    prompts = [tuple(heads[i // 3] + tail) for i, tail in enumerate(tails)]  # a a a b b b

    def serve(groups, **options):
        engine = sibling(open_engine(folder, config, groups, "none", "standard"), **options)
        ids = []
        for first in (0, 3, 1, 4, 2, 5):  # a b, then a b, then a b; two at a time
            params = SamplingParams(max_new_tokens=4, ignore_eos=True)
            engine.add(Request(str(first), prompts[first], params))
            if first < 3:
                continue
            while engine.has_work():
                for event in engine.step():
                    ids.append((event.request_id, list(event.token_ids)))
        by_request = {name: sum((new for one, new in ids if one == name), []) for name in "012345"}
        return by_request, engine.take_counts().hits

    want, _ = serve(Groups.single())
    found = run_ranks(lambda rank, world: serve(Groups.build(Topology(**sizes), rank), prefix_cache=True), 2)
    assert [ids for ids, _ in found] == [want, want]
    assert [hits for _, hits in found] == [4, 4]
