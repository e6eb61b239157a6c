"""The multi-token prediction draft: its laws after any history of chunks, rejections and layouts, and what it refuses.

The laws it proposes from are compared with the training code's chains, which run over whole sequences, keep no cache,
and are themselves held to rows run one by one.
"""

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest
import torch
from dspark.layers.draft_heads_host import HostDraftBlock
from dspark.layers.kernels import Kernels
from dspark.layers.rope import build_rope_table
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cache import Cache, CacheLayout
from dspark.runtime.checkpoint import CheckpointReader, bundled_model
from dspark.runtime.draft.base import DraftNoise
from dspark.runtime.draft.mtp import MAX_GAMMA, MTPDrafter
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine
from dspark.runtime.model_config import load_model_config
from dspark.runtime.models.deepseek_v4 import DeepseekV4, attention_sizes
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.step import Span, build_step
from dspark.runtime.training.batches import Batch
from dspark.runtime.training.block_draft import FrozenEnds
from dspark.runtime.training.chain_draft import ChainDraft, MtpFusion

GOLDEN = json.loads((pathlib.Path(__file__).resolve().parents[2] / "data" / "models" / "golden.json").read_text())[
    "items"
]
CPU = torch.device("cpu")
CONTEXT = 512
# Prompts of 13 to 400 tokens: inside the window of 64, around it, and beyond the first page of 256.
PICKED = sorted(range(len(GOLDEN)), key=lambda i: len(GOLDEN[i]["prompt_ids"]))[::4]
TEXTS = {str(i): [*GOLDEN[i]["prompt_ids"], *GOLDEN[i]["output_ids"]] for i in range(len(GOLDEN))}


def load(folder, groups=None, draft="mtp", **options):
    config = resolve(
        EngineConfig(**{"max_context": CONTEXT, "max_running": 3, "draft": draft, **options}),
        model_dir=str(folder),
        device_type="cpu",
        max_positions=4096,
        own_draft="none",
    )
    return load_engine(config, groups or Groups.single(), CPU)


class Steered:
    """Lets a draft propose as it would at temperature 1 and notes that, but hands on the golden continuation with
    mistakes, so that blocks are kept to any length."""

    def __init__(self, engine, seed):
        self.engine, self.draft, self.rng = engine, engine.drafter, np.random.default_rng(seed)
        self.notes = []
        engine._drafting.drafter = self

    def __getattr__(self, name):
        return getattr(self.draft, name)

    def propose(self, requests, noise):
        gamma, number = self.draft.gamma, len(requests.slots)
        if noise is None:
            return self.draft.propose(requests, None)
        block = self.draft.propose(requests, DraftNoise(np.ones(number), self.rng.random((number, gamma))))
        names = {state.slot: state.request.request_id for state in self.engine._states.values() if state.slot >= 0}
        steered = np.zeros((number, gamma), np.int64)
        for r, (slot, start) in enumerate(zip(requests.slots, requests.starts)):
            self.notes.append((names[slot].split("/")[0], start, block.tokens[r], block.probs[r]))
            text = TEXTS[names[slot].split("/")[0]][start + 1 : start + 1 + gamma]
            steered[r, : len(text)] = text
        wrong = self.rng.random(steered.shape) < 0.25
        return HostDraftBlock(np.where(wrong, (steered + 1) % 1536, steered), None, None)


def run(engine, names, num_tokens=20, seed=0):
    """Golden tokens come out; gives what the draft noted (None where there is no draft)."""
    steered = Steered(engine, seed) if hasattr(engine.drafter, "propose") else None
    params = [SamplingParams(max_new_tokens=num_tokens - 5 * (i % 3), ignore_eos=True) for i in range(len(names))]
    for name, own in zip(names, params):
        engine.add(Request(name, tuple(GOLDEN[int(name.split("/")[0])]["prompt_ids"]), own))
    tokens, kept = {name: [] for name in names}, 0
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            kept += event.spec["accepted"] if event.spec else 0
    for name, own in zip(names, params):
        assert tokens[name] == GOLDEN[int(name.split("/")[0])]["output_ids"][: own.max_new_tokens], name
    assert kept > len(names)
    return steered and steered.notes


@functools.cache
def features(name):
    """The target's streams [T, n D] after its last layer, over the whole text at once."""
    config = load_model_config(bundled_model())
    model = DeepseekV4(config, CheckpointReader(bundled_model(), config), Groups.single(), Kernels("torch"), 600, CPU)
    layout = CacheLayout(tuple(attention_sizes(config, layer) for layer in range(config.num_layers)), 1, 4)
    cache = Cache(layout, 1, layout.pages_for(600), 600, CPU, torch.float32)
    assert cache.reserve(cache.acquire(), len(TEXTS[name]))
    found = []

    def probe(what, layer, value):
        if what == "streams" and layer == config.num_layers - 1:
            found.append(value.flatten(1).clone())

    step = build_step([Span(0, 0, TEXTS[name], 1)], cache.page_table, layout.ratios, config.vocab_size)
    model.forward(step, cache, probe)
    return found[0]


def check_laws(folder, notes):
    """Every noted law is that of the training code's chain over the whole text."""
    config = load_model_config(folder)
    reader = CheckpointReader(folder, config)
    weights = {name: reader.take(name) for name in reader.names("draft") if name in reader}
    ends = FrozenEnds(reader.take("embed.weight"), reader.take("head.weight"))
    rope = build_rope_table(config.rope_dim, config.main_rope.theta, 600, None, CPU)
    model = ChainDraft(config, weights, ends, rope, MtpFusion(config))
    for name in {note[0] for note in notes}:
        own = [note for note in notes if note[0] == name]
        anchors, ids = torch.tensor([note[1] for note in own]), torch.tensor(TEXTS[name])
        drafts, laws = torch.from_numpy(np.stack([note[2] for note in own])), np.stack([note[3] for note in own])
        begins = torch.zeros_like(ids)
        flags = torch.ones(len(anchors), drafts.shape[1], dtype=torch.bool)
        batch = Batch(ids, features(name), features(name), torch.arange(len(ids)), begins, begins > -1, anchors, flags)
        logits, _ = model.chain(batch, drafts.shape[1], lambda k, _, drafts=drafts: drafts[:, k])
        np.testing.assert_allclose(laws, logits.double().softmax(-1).numpy(), atol=2e-5, err_msg=name)


@pytest.mark.parametrize("gamma, chunk_size", [(1, 512), (3, 7), (MAX_GAMMA, 30)])
def test_laws_after_any_history(made_up_draft, gamma, chunk_size):
    folder = made_up_draft("mtp")
    engine = load(folder, gamma=gamma, chunk_size=chunk_size)
    names = [str(i) for i in PICKED]
    notes = run(engine, names)
    assert {note[0] for note in notes} == set(names)
    check_laws(folder, notes)
    # The slots are used again by other requests.
    check_laws(folder, run(load_again(engine), names[::-1], seed=1))


def load_again(engine):
    """The same engine with its draft unwrapped."""
    engine._drafting.drafter = engine.drafter.draft
    return engine


def test_laws_behind_a_shared_prefix(made_up_draft):
    """A request that resumes behind a stored page finds the draft's rings there too."""
    folder = made_up_draft("mtp")
    engine = load(folder, gamma=5, prefix_cache=True, max_running=1)
    long = str(next(i for i, item in enumerate(GOLDEN) if len(item["prompt_ids"]) > 257))
    notes = run(engine, [f"{long}/first", f"{long}/second"])
    assert engine.counts.hits == 1 and len(notes) > 2
    check_laws(folder, notes)


def on_ranks(rank, world, folder, layout, options):
    engine = load(folder, Groups.build(Topology.make(world, **layout), rank), gamma=4, chunk_size=40, **options)
    notes = run(engine, [str(i) for i in PICKED])
    decides = engine.groups.pp.rank == engine.groups.pp.size - 1 and engine.groups.attn_block.rank == 0
    assert decides == bool(notes)
    return notes or []


@pytest.mark.parametrize(
    "layout, options",
    [
        ({"tp": 2}, {}),
        ({"dp": 2, "ep": 2}, {"max_running": 1}),
        ({"cp": 2}, {}),
        ({"cp": 2}, {"cp_split": "zigzag", "cp_decode": "replicate"}),
        ({"pp": 2}, {}),
    ],
    ids=["tp", "dp-ep", "cp", "cp-zigzag", "pp"],
)
def test_laws_on_ranks(made_up_draft, run_ranks, layout, options):
    folder = made_up_draft("mtp")
    notes = sum(run_ranks(on_ranks, 2, folder, layout, options, timeout=240), [])
    assert {note[0] for note in notes} == {str(i) for i in PICKED}
    check_laws(folder, notes)


def test_idle_ranks_make_as_many_forwards(made_up_draft, run_ranks):
    """One request on two DP ranks: the other has no rows, and the tokens still come out."""
    folder = made_up_draft("mtp")
    first, second = run_ranks(alone_on_two, 2, folder, timeout=240)
    assert bool(first) != bool(second)
    check_laws(folder, first + second)


def alone_on_two(rank, world, folder):
    return run(load(folder, Groups.build(Topology.make(world, dp=2), rank), gamma=7), [str(PICKED[0])]) or []


def test_refusals(made_up_draft):
    with pytest.raises(ValueError, match=f"--gamma is {MAX_GAMMA + 1}, but .* 1 to {MAX_GAMMA} tokens"):
        load(made_up_draft("mtp"), gamma=MAX_GAMMA + 1)
    several = dataclasses.replace(load_model_config(made_up_draft("mtp")), num_nextn_predict_layers=2)
    with pytest.raises(ValueError, match="2 multi-token prediction layers .* exactly 1"):
        MTPDrafter.tap_layers(several)
    with pytest.raises(ValueError, match="are a DSpark draft"):
        load(made_up_draft("dflash"), gamma=1)
    with pytest.raises(ValueError, match="no DSpark draft"):
        load(made_up_draft("mtp"), draft="dspark")
    with pytest.raises(ValueError, match="--confidence-threshold needs confidences"):
        load(made_up_draft("mtp"), confidence_threshold=0.5)
    with pytest.raises(ValueError, match="--sts sts.json calibrates confidences"):
        load(made_up_draft("mtp"), sts="sts.json")
