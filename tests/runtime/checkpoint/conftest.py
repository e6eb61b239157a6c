"""A tiny checkpoint, written by hand so that it can also be written wrongly."""

import json
import struct

import numpy as np
import pytest
from dspark.runtime.checkpoint import RandomWeights, expected_tensors
from dspark.runtime.model_config import ModelConfig

CONFIG = {
    "model_type": "deepseek_v4",
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "sliding_window": 12,
    "swiglu_limit": 10.0,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 1024,
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
_NUMPY_NAMES = {"float32": "F32", "int64": "I64", "uint8": "U8", "int8": "I8", "float16": "F16"}


def pack(tensors, *, header=None, length=None, tail=b""):
    """The bytes of a safetensors file with ``tensors`` (name -> array, or (dtype name, shape, bytes)).

    ``header`` edits the header's dict (or returns the header's bytes), ``length`` replaces its length field.
    """
    entries, data = {}, b""
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            tensor = (_NUMPY_NAMES[str(tensor.dtype)], list(tensor.shape), tensor.tobytes())
        dtype, shape, raw = tensor
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = header(entries) if header is not None else None
    text = json.dumps(entries).encode() if text is None else text
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + data + tail


class Tiny:
    """The tiny model: ``raw`` is its config.json, ``weights`` its random weights as arrays by canonical name."""

    def __init__(self, **changes):
        self.raw = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
        self.config = ModelConfig.from_dict(self.raw)
        source = RandomWeights(self.config, seed=3)
        self.weights = {name: source.take(name).numpy() for name in source.names()}
        self.specs = expected_tensors(self.config)

    pack = staticmethod(pack)

    def write(self, folder, tensors=None, **how):
        """One ``model.safetensors`` and the ``config.json`` in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.raw))
        (folder / "model.safetensors").write_bytes(pack(self.weights if tensors is None else tensors, **how))
        return folder

    def write_shards(self, folder, shards, index=None):
        """Files by name, each with its tensors, and an index (a true one unless given)."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.raw))
        for name, tensors in shards.items():
            (folder / name).write_bytes(pack(tensors))
        true = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        index = {"metadata": {}, "weight_map": true} if index is None else index
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    def halves(self):
        """The weights in two shards."""
        names = list(self.weights)
        first, second = names[: len(names) // 2], names[len(names) // 2 :]
        return {
            "model-00001-of-00002.safetensors": {name: self.weights[name] for name in first},
            "model-00002-of-00002.safetensors": {name: self.weights[name] for name in second},
        }


@pytest.fixture(scope="session")
def tiny():
    """The tiny model without a draft."""
    return Tiny()


@pytest.fixture(scope="session")
def make_tiny():
    """``make_tiny(**changes)``: a tiny model with other config keys."""
    return Tiny
