"""Checkpoints of the bundled target with made-up drafts, written once a session in the release naming."""

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.runtime.checkpoint import RandomWeights, bundled_model
from dspark.runtime.draft import own_draft
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine
from dspark.runtime.model_config import DSparkConfig, load_model_config
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.training.export import dspark_keys, write_bundled
from safetensors import safe_open
from safetensors.torch import load_file, save_file

SPECULATIVE = pathlib.Path(__file__).resolve().parents[2] / "data" / "speculative"
BLOCK = 7
DSPARK = DSparkConfig(
    block_size=BLOCK,
    markov_rank=8,
    markov_head_type="vanilla",
    noise_token_id=2,
    target_layer_ids=(1, 3),
    num_routed_experts=4,
    num_experts_per_tok=2,
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    sample_from_anchor=True,
)
HEADLESS = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
# kind of draft -> what config.json announces; None: a plain multi-token prediction layer
KINDS = {
    "dspark": DSPARK,
    "gated": dataclasses.replace(DSPARK, markov_head_type="gated", target_layer_ids=(3,)),
    "rnn": dataclasses.replace(DSPARK, markov_head_type="rnn", target_layer_ids=(2,), sample_from_anchor=False),
    "dflash": dataclasses.replace(DSPARK, target_layer_ids=(3,), **HEADLESS),
    "mtp": None,
}


@pytest.fixture(scope="session")
def made_up_draft(tmp_path_factory):
    """``made_up_draft(kind)``: the folder of the bundled target with a random draft of ``kind``, see ``KINDS``."""

    @functools.cache
    def make(kind):
        draft, target = KINDS[kind], load_model_config(bundled_model())
        keys = dspark_keys(draft) if draft else {"num_nextn_predict_layers": 1}
        config = dataclasses.replace(target, dspark=draft, num_nextn_predict_layers=0 if draft else 1)
        source = RandomWeights(config, seed=3)
        tensors = {name: source.take(name) for name in source.names("draft")}
        folder = tmp_path_factory.mktemp("drafts") / kind
        write_bundled(bundled_model(), folder, tensors, keys, {"method": kind})
        return folder

    return make


def load(folder, groups=None, **options):
    config = resolve(
        EngineConfig(**{"max_context": 512, "max_running": 3, "chunk_size": 64} | options),
        model_dir=str(folder),
        device_type="cpu",
        max_positions=4096,
        own_draft=own_draft(load_model_config(folder)),
    )
    return load_engine(config, groups or Groups.single(), torch.device("cpu"))


@pytest.fixture
def load_draft():
    """``load_draft(folder, groups, **options)``: an engine of a checkpoint with its own draft."""
    return load


class Dense:
    """A tiny Qwen3 target of other code with drafts beside it, and engines of them."""

    def __init__(self, root):
        self.root = root
        meta, self.tensors = self.stored("dspark", "target.")
        self.config = meta["target"] | {"dtype": "float32"}
        self.target = self.write("target", self.config, self.tensors)
        normless = {
            name: x for name, x in self.tensors.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))
        }
        llama = {k: v for k, v in self.config.items() if k not in ("layer_types", "sliding_window")}
        self.llama = self.write("llama", llama | {"model_type": "llama"}, normless)
        self.eagle = self.write("eagle", *eagle_draft(self.config))
        meta, tensors = self.stored("eagle3", "draft.")
        self.eagle3 = self.write("eagle3", meta["draft"] | {"dtype": "float32"}, tensors)
        kept = torch.arange(0, 24, 3)
        few = {"lm_head.weight": tensors["lm_head.weight"][kept], "d2t": kept - torch.arange(len(kept))}
        few = meta["draft"] | {"dtype": "float32", "draft_vocab_size": len(kept)}, tensors | few
        self.eagle3_few = self.write("eagle3_few", *few)
        self.prompts = [tuple(np.random.default_rng(3 + n).integers(0, 24, n).tolist()) for n in (11, 1, 30, 4, 17)]

    @staticmethod
    def stored(name, part=""):
        """What the reference data of a draft says of itself, and its tensors, those below ``part`` without that."""
        with safe_open(SPECULATIVE / f"tiny_{name}_qwen3.safetensors", "pt") as file:
            names = [key for key in file.keys() if key.startswith(part)]
            return json.loads(file.metadata()["meta"]), {key.removeprefix(part): file.get_tensor(key) for key in names}

    def write(self, name, config, tensors):
        """A checkpoint folder."""
        folder = self.root / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
        return folder

    def load(self, draft_model=None, groups=None, target=None, **options):
        """An engine of the target with the draft in a folder, or without one."""
        target = self.target if target is None else target
        folder = None if draft_model is None else str(draft_model)
        options = {"max_context": 256, "max_running": 3, "chunk_size": 8, "draft_model": folder} | options
        config = resolve(
            EngineConfig(**options),
            model_dir=str(target),
            device_type="cpu",
            max_positions=512,
            own_draft=own_draft(load_model_config(target), folder),
        )
        return load_engine(config, groups or Groups.single(), torch.device("cpu"))

    def run(self, engine, num_new=24, **params):
        """The tokens of the prompts, each shorter by one, and the counts of those that drafted."""
        tokens, specs = {}, []
        for i, ids in enumerate(self.prompts):
            sampling = SamplingParams(max_new_tokens=num_new - i, ignore_eos=True, **params)
            engine.add(Request(str(i), ids, sampling))
        while engine.has_work():
            for event in engine.step():
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
                specs += [event.spec] if event.spec else []
        return tokens, specs


def eagle_draft(target, seed=1, noise=0.1):
    """The config and tensors of an EAGLE-1 draft that looks like a public one: near the identity on states."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows, columns, size=1.0):
        return size * columns**-0.5 * torch.randn(rows, columns, generator=generator)

    width, ffn, head = target["hidden_size"], target["intermediate_size"], target["head_dim"]
    heads, kv_heads = head * target["num_attention_heads"], head * target["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": random(heads, width),
        "self_attn.k_proj": random(kv_heads, width),
        "self_attn.v_proj": random(kv_heads, width, noise),
        "self_attn.o_proj": random(width, heads, noise),
        "mlp.gate_proj": random(ffn, width, noise),
        "mlp.up_proj": random(ffn, width),
        "mlp.down_proj": random(width, ffn),
        "post_attention_layernorm": torch.ones(width),
    }
    tensors = {f"layers.0.{name}.weight": tensor for name, tensor in layer.items()}
    tensors["fc.weight"] = torch.cat((random(width, width, noise), torch.eye(width) + random(width, width, noise)), 1)
    tensors["fc.bias"] = random(1, width)[0]
    own = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    return {k: v for k, v in target.items() if k != "layer_types"} | own, tensors


@pytest.fixture(scope="session")
def speculative_data():
    """Where the reference data of drafts lies."""
    return SPECULATIVE


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    """See :class:`Dense`."""
    return Dense(tmp_path_factory.mktemp("dense"))


def prediction_folder(folder, name, **more):
    """A random DeepSeek of transformers with a prediction layer, near its last layer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "v_head_dim": 8}
    routing = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
    layers = {"first_k_dense_replace": 1, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
    rope = {
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **routing, **layers, **rope, **more)
    config.dtype = torch.float32
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for name, tensor in model.named_parameters():
        if tensor.dim() > 1:
            tensor.data.normal_(std=1.0 if "embed" in name else 1.5 * tensor.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.replace("layers.1", "layers.2")] = tensors[name].clone()
    tensors["model.layers.2.eh_proj.weight"] = torch.cat((torch.zeros(32, 32), torch.eye(32)), 1)
    tensors["model.layers.2.eh_proj.weight"] += 0.1 * torch.randn(32, 64)
    tensors |= {f"model.layers.2.{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def prediction_folders(tmp_path_factory):
    """Targets with a prediction layer of their own, by kind; the sparse one's queries choose 6 tokens."""
    root, sparse = tmp_path_factory.mktemp("prediction"), {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 6}
    sparse["num_nextn_predict_layers"] = 1
    return {
        "mtp_v3": prediction_folder(root / "v3", "DeepseekV3"),
        "mtp_v32": prediction_folder(root / "v32", "DeepseekV32", **sparse),
    }
