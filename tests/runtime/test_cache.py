"""The cache's books (slots, pages, bytes), and that results depend neither on which pages a request got nor on what was
in them."""

import pytest
import torch
from dspark.layers.attention.v4 import V4AttentionSizes
from dspark.layers.kernels import Kernels
from dspark.parallel.groups import Groups
from dspark.runtime.cache import Cache, CacheLayout
from dspark.runtime.checkpoint import RandomWeights
from dspark.runtime.model_config import ModelConfig
from dspark.runtime.models.deepseek_v4 import DeepseekV4, attention_sizes
from dspark.runtime.step import Span, build_step

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "deepseek_v4",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 8,
    "o_groups": 1,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 6,
    "index_topk": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "sliding_window": 10,
    "swiglu_limit": 10.0,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
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


def attention(kind, ratio, head_dim=8, index_head_dim=6, window=10):
    return V4AttentionSizes(kind, ratio, 16, 2, head_dim, 8, 1, 8, window, 2, index_head_dim, 4, 1e-6, 4)


MIXED = (attention("sliding", 0), attention("csa", 4), attention("hca", 128))


@pytest.mark.parametrize("max_verify", [1, 8])
def test_ring_sizes(max_verify):
    layout = CacheLayout(MIXED, max_verify, 4)
    assert [layout.window_rows(sizes) for sizes in MIXED] == [10 + max_verify] * 3
    assert [layout.raw_rows(sizes) for sizes in MIXED] == [0, 2 * 4 + max_verify, 128 + max_verify]
    assert layout.ratios == (4, 128)


@pytest.mark.parametrize(
    "ratios,page_tokens",
    [((), 256), ((4,), 256), ((4, 128), 256), ((3,), 258), ((4, 16), 256), ((512,), 512), ((5, 7), 280)],
)
def test_no_window_straddles_pages(ratios, page_tokens):
    layout = CacheLayout(tuple(attention("hca", ratio) for ratio in ratios) or MIXED[:1], 1, 4)
    assert layout.page_tokens == page_tokens
    assert all(layout.page_tokens % ratio == 0 for ratio in ratios)


def test_bytes_are_those_of_the_buffers():
    """Numbers worked out by hand, and the tensors themselves."""
    layout = CacheLayout(MIXED, 3, 4)
    # window 13 rows of 8 each; raw: CSA 11 rows of 4 (8 + 6), HCA 131 rows of 16
    assert layout.bytes_per_slot == 4 * (3 * 13 * 8 + 11 * 56 + 131 * 16)
    # CSA 14 numbers per 4 tokens, HCA 8 per 128
    assert layout.bytes_per_token == 4 * (14 / 4 + 8 / 128)
    assert layout.bytes_per_page == 4 * (14 * 64 + 8 * 2)
    cache = Cache(layout, num_slots=5, num_pages=7, max_context=700, device=CPU, dtype=torch.float32)
    sizes = [sum(buffer.nbytes for buffer in (layer.window, layer.raw)) for layer in cache.layers]
    assert sum(sizes) == 5 * layout.bytes_per_slot
    pools = [sum(buffer.nbytes for buffer in (layer.entries, layer.index_entries)) for layer in cache.layers]
    assert sum(pools) == 7 * layout.bytes_per_page
    assert cache.page_table.shape == (5, 3)
    assert cache.bytes_in_use == 0
    slot = cache.acquire()
    assert cache.reserve(slot, 257)
    assert cache.bytes_in_use == layout.bytes_per_slot + 2 * layout.bytes_per_page


def test_slots_and_pages_come_and_go():
    cache = Cache(CacheLayout(MIXED, 1, 4), num_slots=3, num_pages=5, max_context=1024, device=CPU, dtype=torch.float32)
    first, second = cache.acquire(), cache.acquire()
    assert first != second and cache.num_free_slots == 1 and cache.num_free_pages == 5
    assert cache.reserve(first, 1) and cache.num_free_pages == 4
    assert cache.reserve(first, 256) and cache.num_free_pages == 4
    assert cache.reserve(second, 700) and cache.num_free_pages == 1
    before = cache.page_table.clone()
    assert not cache.reserve(first, 1024) and cache.num_free_pages == 1
    assert torch.equal(cache.page_table, before)
    assert cache.reserve(first, 257) and cache.num_free_pages == 0
    held = cache.page_table[first, :2].tolist() + cache.page_table[second, :3].tolist()
    assert sorted(held) == [0, 1, 2, 3, 4]
    assert cache.reserve(first, 512) and not cache.reserve(first, 513)
    cache.release(second)
    assert cache.num_free_slots == 2 and cache.num_free_pages == 3
    assert cache.reserve(first, 1024) and cache.num_free_pages == 1
    cache.release(first)
    assert cache.num_free_slots == 3 and cache.num_free_pages == 5 and cache.bytes_in_use == 0
    assert sorted(cache.acquire() for _ in range(3)) == [0, 1, 2]


def test_sliding_layers_need_no_pages():
    layout = CacheLayout(MIXED[:1], 1, 4)
    cache = Cache(layout, num_slots=2, num_pages=0, max_context=10**6, device=CPU, dtype=torch.float32)
    assert layout.pages_for(10**6) == 0 and layout.bytes_per_token == 0 and layout.bytes_per_page == 0
    assert cache.reserve(cache.acquire(), 10**6)


def model_of(backend):
    config = ModelConfig.from_dict(CONFIG)
    return DeepseekV4(config, RandomWeights(config, seed=2), Groups.single(), Kernels(backend), 1024, CPU)


def new_cache(model, num_slots, num_pages):
    sizes = tuple(attention_sizes(model.config, layer) for layer in range(model.config.num_layers))
    return Cache(CacheLayout(sizes, 1, 4), num_slots, num_pages, 1024, CPU, torch.float32)


def forward(model, cache, spans):
    return model.forward(build_step(spans, cache.page_table, cache.layout.ratios, 40), cache).logits


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_old_contents_and_scattered_pages_do_not_matter(backend):
    """Three requests of up to 600 tokens grow by turns, in pages that other requests left behind and that hold NaN."""
    if backend == "numba":
        pytest.importorskip("numba")
    model = model_of(backend)
    made = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 40, (n,), generator=made).tolist() for n in (600, 300, 513)]
    alone = []
    for prompt in prompts:
        cache = new_cache(model, 1, 3)
        assert cache.reserve(cache.acquire(), len(prompt))
        alone.append(forward(model, cache, [Span(0, 0, prompt, len(prompt))]))
    cache = new_cache(model, 4, 12)
    for layer in cache.layers:
        layer.window.fill_(1e30)
        layer.raw.fill_(1e30)
        layer.entries.fill_(float("nan"))
        layer.index_entries.fill_(float("nan"))
    others = [cache.acquire() for _ in range(4)]
    assert all(cache.reserve(slot, 256 * 2) for slot in others)
    for slot in (others[2], others[0], others[3], others[1]):
        cache.release(slot)
    slots, together = [cache.acquire() for _ in prompts], [[] for _ in prompts]
    for start in range(0, 600, 75):
        spans = []
        for slot, prompt in zip(slots, prompts):
            part = prompt[start : start + 75]
            assert cache.reserve(slot, len(prompt[: start + 75]))
            spans.append(Span(slot, start, part, len(part)))
        logits = forward(model, cache, spans).split([len(span.tokens) for span in spans])
        for pieces, piece in zip(together, logits):
            pieces.append(piece)
    tables = [cache.page_table[slot, :3].tolist() for slot in slots]
    assert any(pages != sorted(pages) for pages in tables), "the pages are not scattered"
    for pieces, expected in zip(together, alone):
        torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=1e-4)
