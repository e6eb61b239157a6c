"""Tokens per second of a made-up DeepSeek-V4 model of about 3 billion parameters on one GPU, with and without graphs.

Weights are noise that is made on the device, so nothing is read; the text means nothing, but the work is that of a real
model. Requests start with a prompt of --context tokens and decode --steps tokens each.

Example: dspark bench synthetic --batch 1,32 --context 2048
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time

import torch

from ...layers.kernels import choose
from ...parallel.groups import Groups
from ..checkpoint.config_file import model_config_from_dict
from ..checkpoint.spec import expected_tensors
from ..cli import EXIT_OK
from ..draft.none import NoDraft
from ..engine import Engine
from ..engine_config import EngineConfig
from ..graphs import Graphs, record_on_cuda
from ..load import make_cache
from ..model_config import ModelConfig
from ..models.deepseek_v4 import DeepseekV4
from ..request import Request, SamplingParams
from .flags import at_least_one, numbers
from .machine import machine_line
from .table import table

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_n_heads": 16,
    "index_topk": 512,
    "max_position_embeddings": 65536,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_hash_layers": 1,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
}
SIZES = {
    "few billion": {
        "head_dim": 512,
        "hidden_size": 2048,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 64,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 7,
        "o_groups": 4,
        "o_lora_rank": 1024,
        "q_lora_rank": 1024,
        "vocab_size": 129280,
        "compress_ratios": [0, 4, 128, 4, 128, 4, 128],
    },
    "tiny": {
        "head_dim": 32,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "o_groups": 2,
        "o_lora_rank": 16,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "index_head_dim": 32,
        "vocab_size": 512,
        "compress_ratios": [0, 4, 128],
    },
}


class NoiseWeights:
    """A :class:`~dspark.layers.params.ParamSource` of noise that is made on ``device`` as it is taken."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        self._specs = expected_tensors(config)
        self.num_parameters = sum(torch.Size(spec.shape).numel() for spec in self._specs.values())

    def take(
        self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See :meth:`ParamSource.take`. Norms and scales are 1; products keep the size of their rows."""
        spec = self._specs[name]
        shape = list(spec.shape)
        shape[dim] = (shape[dim] if stop is None else stop) - start
        made = torch.Generator(self._device)
        made.manual_seed(
            int.from_bytes(hashlib.blake2b(f"{name} {dim} {start}".encode(), digest_size=7).digest(), "big")
        )
        if spec.kind == "table":
            return torch.randint(0, self._config.num_experts, shape, generator=made, device=self._device)
        dtype = dtype or self._dtype
        if name.endswith("norm.weight") or name.endswith("_scale"):
            return torch.ones(shape, dtype=dtype, device=self._device)
        return torch.randn(shape, generator=made, dtype=dtype, device=self._device) * spec.shape[-1] ** -0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument("--size", choices=tuple(SIZES), default="few billion", help="of the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=numbers, default=(1, 32), metavar="N,..", help="requests (default 1,32)")
    parser.add_argument("--context", type=at_least_one, default=2048, metavar="N", help="prompt tokens (default 2048)")
    parser.add_argument("--steps", type=at_least_one, default=64, metavar="N", help="tokens to decode (default 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the table; raises ``ValueError`` without a GPU unless ``--device cpu`` is given."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU to measure on; --device cpu --size tiny shows that it runs")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = model_config_from_dict(CONFIG | SIZES[args.size])
    source, groups, kernels = NoiseWeights(config, device, dtype), Groups.single(), choose(device, dtype)
    max_context = args.context + args.steps + 8
    model = DeepseekV4(config, source, groups, kernels, max_context, device, dtype=dtype)
    result, rows = {"parameters": source.num_parameters, "kernels": kernels.backend}, []
    for batch in args.batch:
        for graphed in (False, True) if device.type == "cuda" else (False,):
            prefill, decode = _tokens_per_second(model, groups, device, dtype, batch, args, graphed)
            name = "graphs" if graphed else "no graphs"
            figures = {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode}
            result.setdefault(f"batch_{batch}", {})[name] = figures
            rows.append((f"{batch} requests, {name}", f"{prefill:.0f}", f"{decode:.1f}"))
    if args.json:
        print(json.dumps(result))
        return EXIT_OK
    print(f"model:   {source.num_parameters / 1e9:.2f} billion parameters of noise, {dtype}, {kernels.backend} kernels")
    print(f"machine: {machine_line(device)}")
    print(table(("", "prefill tokens/s", "decode tokens/s"), rows))
    return EXIT_OK


def _tokens_per_second(
    model: DeepseekV4,
    groups: Groups,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    args: argparse.Namespace,
    graphed: bool,
) -> tuple[float, float]:
    """Of the prompts, and of decoding behind them."""
    max_context, name = args.context + args.steps + 8, str(dtype).removeprefix("torch.")
    config = EngineConfig(
        device=device.type, dtype=name, max_running=batch, max_context=max_context, chunk_size=4096, draft="none"
    )
    cache = make_cache(model.config, config, device)
    graphs = Graphs(model, cache, groups, max_context, record_on_cuda) if graphed else None
    engine = Engine(model, NoDraft(), cache, groups, config, graphs=graphs)
    params = SamplingParams(max_new_tokens=args.steps + 4, ignore_eos=True)
    made = torch.Generator().manual_seed(0)
    for i in range(batch):
        ids = torch.randint(2, model.config.vocab_size, (args.context,), generator=made).tolist()
        engine.add(Request(str(i), tuple(ids), params, i))
    start, started = _now(device), set()
    while len(started) < batch:
        started |= {event.request_id for event in engine.step()}
    prefill = batch * args.context / (_now(device) - start)
    for _ in range(2):  # graphs are recorded
        engine.step()
    start = _now(device)
    count = sum(len(event.token_ids) for _ in range(args.steps // 2) for event in engine.step())
    return prefill, count / (_now(device) - start)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
