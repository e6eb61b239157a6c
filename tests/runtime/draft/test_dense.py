"""Drafts on dense targets keep to the contract of every draft: the target's own tokens when greedy, its exact law when
sampled, whatever the layout."""

import functools
import json
import pathlib
import shutil

import numpy as np
import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.draft import draft_config, drafter_class, own_draft
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine
from dspark.runtime.model_config import load_model_config
from dspark.runtime.request import Request, SamplingParams
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.stats import chi2

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "speculative"
CPU = torch.device("cpu")
TOLERANCE = 2e-5
KINDS = ("dspark", "dflash", "dflash2", "eagle3", "eagle3_few", "model", "ngram", "mtp_v3", "mtp_v32")
BASE = {"dtype": "float32"}


def stored(name):
    with safe_open(DATA / f"tiny_{name}_qwen3.safetensors", "pt") as file:
        return json.loads(file.metadata()["meta"]), {key: file.get_tensor(key) for key in file.keys()}


def write(folder, config, tensors, prefix=""):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k.removeprefix(prefix): v.contiguous() for k, v in tensors.items() if k.startswith(prefix)},
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of the tiny target and of its drafts by name."""
    root = tmp_path_factory.mktemp("dense")
    meta, tensors = stored("dspark")
    made = {"target": write(root / "target", meta["target"] | BASE, tensors, "target.")}
    for name in ("dspark", "dflash", "eagle3"):
        meta, tensors = stored(name)
        made[name] = write(root / name, meta["draft"] | BASE, tensors, "draft.")
    tensors = {k.removeprefix("draft."): v for k, v in tensors.items() if k.startswith("draft.")}
    made["dflash2"] = refined(root / "dflash2")
    made["eagle3_few"] = few_tokens(root / "eagle3_few", meta["draft"], tensors)
    made["model"] = other_model(root / "model", made["target"])
    return made


def few_tokens(folder, config, tensors):
    """The EAGLE-3 draft with a head over every third token, in the public naming."""
    kept = torch.arange(0, 24, 3)
    tensors = {k.replace("layers.0.", "midlayer."): v for k, v in tensors.items() if k != "embed_tokens.weight"}
    tensors |= {"lm_head.weight": tensors["lm_head.weight"][kept], "d2t": kept - torch.arange(len(kept))}
    tensors["t2d"] = torch.isin(torch.arange(24), kept)
    return write(folder, config | BASE | {"draft_vocab_size": len(kept)}, tensors)


def refined(folder):
    """The DFlash draft with convolutions near the identity, and a made-up selector over 6 tokens."""
    meta, tensors = stored("dflash")
    tensors = {k.removeprefix("draft."): v for k, v in tensors.items() if k.startswith("draft.")}
    for name in (f"layers.{layer}.{name}_conv" for layer in range(2) for name in ("attention", "mlp")):
        tensors[f"{name}.base_kernel"] = torch.tensor([1.0, 0.1]).view(1, 2, 1).repeat(2, 1, 32)
        tensors[f"{name}.kernel_projection.weight"] = torch.zeros(2 * 2 * 4, 32)
    generator = torch.Generator().manual_seed(6)
    tensors["candidate_selector.hidden_projection.weight"] = 0.1 * torch.randn(4, 32, generator=generator)
    for side in ("predecessor", "successor"):
        tensors[f"candidate_selector.{side}_codebook"] = torch.randn(24, 4, generator=generator)
    added = {"selector_rank": 4, "selector_top_k": 6, "conv_kernel_size": 2, "conv_group_size": 8}
    draft = meta["draft"] | BASE
    return write(folder, draft | {"dflash_config": draft["dflash_config"] | added}, tensors)


def other_model(folder, target):
    """The target with noise in its weights, as a model of its own."""
    shutil.copytree(target, folder)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        tensor += 0.15 * tensor.std() * torch.randn(tensor.shape, generator=generator) if tensor.dim() > 1 else 0
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def pair(request, folders, prediction_folders):
    """``pair(kind)``: the folders of target and draft; None where the draft needs none of its own."""

    def find(kind):
        if kind in prediction_folders:
            return prediction_folders[kind], None, "mtp_v3"
        draft = None if kind in ("ngram", "none") else folders[kind]
        return folders["target"], draft, kind if draft is None else "auto"

    return find


def load(target, folder, draft="auto", groups=None, **options):
    config = load_model_config(target)
    folder = None if folder is None else str(folder)
    options = {"max_context": 256, "max_running": 3, "chunk_size": 8, "draft": draft, "draft_model": folder} | options
    resolved = resolve(
        EngineConfig(**options),
        model_dir=str(target),
        device_type="cpu",
        max_positions=512,
        own_draft=own_draft(config, folder),
    )
    return load_engine(resolved, groups or Groups.single(), CPU)


def run(engine, requests):
    tokens, specs = {one.request_id: [] for one in requests}, []
    for one in requests:
        engine.add(one)
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            specs += [event.spec] if event.spec else []
    return tokens, specs


def prompts():
    generator = np.random.default_rng(3)
    return [tuple(generator.integers(0, 24, size).tolist()) for size in (11, 1, 30, 4, 17)]


def greedy_requests(num_new=24):
    return [
        Request(str(i), ids, SamplingParams(max_new_tokens=num_new - i, ignore_eos=True))
        for i, ids in enumerate(prompts())
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens(kind, pair):
    """Those of the target alone: with chunks and blocks of several sizes, trimmed where there are confidences."""
    target, folder, draft = pair(kind)
    expected, _ = run(load(target, None, "none"), greedy_requests())
    config = load_model_config(target)
    folder = folder and str(folder)
    name = own_draft(config, folder) if draft == "auto" else draft
    cls, settings = drafter_class(name), draft_config(name, config, folder)
    cases = [{}, {"gamma": 1, "chunk_size": 64}, {"gamma": 3, "max_running": 1}]
    if cls.has_confidence(settings):
        cases.append({"confidence_threshold": 0.5})
    for case in cases:
        got, specs = run(load(target, folder, draft, **case), greedy_requests())
        assert got == expected, f"{kind} {case}"
        assert kind in ("dflash", "dflash2", "eagle3_few") or sum(spec["accepted"] for spec in specs) > 0
        assert all(spec["accepted"] <= spec["verified"] <= spec["drafted"] for spec in specs)


def test_prediction_by_sparse_attention_does_not_depend_on_chunks(prediction_folders):
    """Which tokens the prediction layer chooses goes by index keys that it keeps of every token."""
    found = []
    for chunk_size in (3, 64):
        engine = load(prediction_folders["mtp_v32"], None, "mtp_v3", gamma=3, chunk_size=chunk_size, max_running=1)
        found.append(run(engine, greedy_requests()))
    assert found[0] == found[1] and sum(spec["accepted"] for spec in found[0][1]) > 0


def on_ranks(rank, world, target, folder, draft, layout):
    sizes = {name: size for name, size in layout.items() if name != "dispatcher"}
    options = {name: layout[name] for name in layout if name == "dispatcher"}
    groups = Groups.build(Topology(**sizes), rank)
    return run(load(target, folder, draft, groups=groups, **options), greedy_requests())[0]


@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind, pair, run_ranks):
    target, folder, draft = pair(kind)
    expected, _ = run(load(target, None, "none"), greedy_requests())
    layouts = [{"tp": 2}, {"tp": 2, "dp": 2}]
    if kind in ("dspark", "mtp_v3", "mtp_v32", "ngram"):
        layouts += [{"tp": 2, "cp": 2}, {"pp": 2}]
    if kind in ("mtp_v3", "mtp_v32"):
        layouts += [{"tp": 2, "dp": 2, "ep": 2, "dispatcher": name} for name in ("normal", "low_latency")]
    for layout in layouts:
        world = layout.get("tp", 1) * layout.get("pp", 1)
        assert run_ranks(on_ranks, world, target, folder, draft, layout)[0] == expected, layout


DEPTH, NUM_SAMPLES = 2, 500
SAMPLED = SamplingParams(max_new_tokens=DEPTH, ignore_eos=True, temperature=1.2, top_k=6)


@functools.cache
def exact_law(target):
    """float64 {tokens: probability} of the first tokens behind a prompt, from whole forwards of the target."""
    engine, law = load(target, None, "none"), {(): 1.0}
    for _ in range(DEPTH):
        longer = {}
        for tokens, mass in law.items():
            p = (next_logits(engine, [*prompts()[0], *tokens]).double() / SAMPLED.temperature).softmax(-1)
            top = p.topk(SAMPLED.top_k)
            for token, share in zip(top.indices.tolist(), (top.values / top.values.sum()).tolist()):
                longer[(*tokens, token)] = mass * share
        law = longer
    return law


def next_logits(engine, tokens):
    from dspark.runtime.step import Span, build_step

    slot = engine.cache.acquire()
    assert engine.cache.reserve(slot, len(tokens))
    table, ratios = engine.cache.page_table, engine.cache.layout.ratios
    step = build_step([Span(slot, 0, tokens, 1)], table, ratios, engine.model.config.vocab_size)
    logits = engine.model.forward(step, engine.cache).logits[0]
    engine.cache.release(slot)
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_law(kind, pair):
    """A chi-square test of the first two tokens against the exact law."""
    target, folder, draft = pair(kind)
    law = exact_law(target)
    engine = load(target, folder, draft, max_running=64, chunk_size=704, **({} if kind == "ngram" else {"gamma": 2}))
    requests = [Request(str(i), prompts()[0], SAMPLED) for i in range(NUM_SAMPLES)]
    tokens, _ = run(engine, requests)
    seen = dict.fromkeys(law, 0)
    for ids in tokens.values():
        seen[tuple(ids)] += 1
    cells = [(seen[ids], mass * NUM_SAMPLES) for ids, mass in law.items()]
    common = [cell for cell in cells if cell[1] >= 5]
    common.append(tuple(np.sum([cell for cell in cells if cell[1] < 5], axis=0)))
    statistic = sum((o - e) ** 2 / e for o, e in common)
    assert chi2.sf(statistic, len(common) - 1) > 1e-3


def test_refusals(folders, pair):
    target = folders["target"]
    for options, message in (
        ({"draft": "dflash"}, "--draft-model"),
        ({"draft": "dflash", "folder": folders["eagle3"]}, "of the format eagle3"),
        ({"draft": "ngram", "folder": folders["eagle3"]}, "reads no folder"),
        ({"draft": "mtp_v3"}, "needs a deepseek_v3 or deepseek_v32 model"),
        ({"folder": folders["dflash"], "gamma": 6}, "--gamma is 6, but the draft proposes blocks of 1 to 5"),
        ({"folder": folders["eagle3"], "prefix_cache": True}, "--prefix-cache"),
        ({"folder": folders["eagle3"], "confidence_threshold": 0.3}, "no confidence head"),
    ):
        with pytest.raises(ValueError, match=message):
            load(target, **({"folder": None} | options))
