"""The engine on decoders: greedy tokens are transformers' own for every kind of layout, chunk size and batch."""

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.balance import expert_links
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine
from dspark.runtime.request import Request, SamplingParams

NUM_NEW = 10
HALVES = {"overlap": "tbo", "overlap_min_rows": 1, "prefix_cache": True}
LAYOUTS = {
    "tp 2": {"tp": 2},
    "dp 2": {"tp": 2, "dp": 2},
    "cp 2 interleave": {"tp": 2, "cp": 2},
    "cp 2 zigzag": {"tp": 2, "cp": 2, "cp_split": "zigzag"},
    "cp 2 ring": {"tp": 2, "cp": 2, "cp_keys": "ring"},
    "cp 4 zigzag ring": {"tp": 4, "cp": 4, "cp_split": "zigzag", "cp_keys": "ring"},
    "cp 2 ring, halves": {"tp": 2, "cp": 2, "cp_keys": "ring", **HALVES},
    "pp 2": {"pp": 2},
    "tp 2 pp 2": {"tp": 2, "pp": 2},
}
WITH_EXPERTS = {
    "ep 2 auto, halves": {"tp": 2, "dp": 2, "ep": 2, "dispatcher": "auto", **HALVES},
    "ep 2 standard, halves, copies": {"tp": 2, "ep": 2, "num_redundant_experts": 2, "eplb_interval": 2, **HALVES},
}


@pytest.fixture(scope="session")
def continuations(hf_checkpoint):
    """``continuations(case)``: folder, prompts and their greedy continuations by transformers' logits."""
    transformers = pytest.importorskip("transformers")

    def make(case):
        folder, ids, _ = hf_checkpoint(case)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        prompts = [ids[0].tolist()[:25], ids[1].tolist()[:3], ids[1].tolist()[5:17]]
        found = []
        for prompt in prompts:
            tokens = torch.tensor([prompt])
            with torch.no_grad():
                for _ in range(NUM_NEW):
                    tokens = torch.cat((tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
            found.append(tokens[0, len(prompt) :].tolist())
        return folder, prompts, found

    return make


def decode(rank, world, folder, prompts, layout=None, **options):
    layout = dict(layout or {})
    options |= {name: layout.pop(name) for name in [*layout] if name in EngineConfig.__dataclass_fields__}
    groups = Groups.build(Topology(**layout), rank) if world > 1 else Groups.single()
    config = resolve(
        EngineConfig(**{"max_context": 64, "max_running": 2, "chunk_size": 16} | options),
        model_dir=str(folder),
        device_type="cpu",
        max_positions=1024,
        own_draft="none",
    )
    engine = load_engine(config, groups, torch.device("cpu"), links=expert_links(config, groups))
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)))
    tokens = {str(i): [] for i in range(len(prompts))}
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return list(tokens.values())


@pytest.mark.parametrize("case", ["qwen3_gqa", "qwen3_mqa_sliding", "deepseek_v3", "deepseek_v32"])
def test_layouts(case, continuations, run_ranks):
    folder, prompts, expected = continuations(case)
    for chunk_size, prefix in ((5, False), (512, False), (16, True)):
        got = decode(0, 1, folder, prompts, chunk_size=chunk_size, prefix_cache=prefix)
        assert got == expected, f"chunks of {chunk_size}"
    chosen = LAYOUTS if case == "qwen3_gqa" else ["dp 2", "cp 2 zigzag", "tp 2 pp 2"]
    if case == "deepseek_v3":
        chosen += ["cp 4 zigzag ring", *WITH_EXPERTS]
    for name in chosen:
        layout = (LAYOUTS | WITH_EXPERTS)[name]
        world = layout.get("tp", 1) * layout.get("pp", 1)
        assert run_ranks(decode, world, folder, prompts, layout)[0] == expected, name


@pytest.mark.parametrize("case,kinds", [("qwen3_mqa_sliding", "sliding mqa"), ("deepseek_v32", "dsa")])
def test_keys_that_cannot_be_passed_on(case, kinds, hf_checkpoint):
    folder, _, _ = hf_checkpoint(case)
    with pytest.raises(ValueError, match=f"--cp-keys ring .* but the model has .*{kinds}"):
        decode(0, 1, folder, [], cp_keys="ring")
