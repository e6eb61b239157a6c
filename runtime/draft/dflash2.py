"""What DFlash 2 adds to a DFlash draft: convolutions along the block around every sublayer, and a selector.

Source: the public ``DFlash2DraftModel`` layout.
"""

from __future__ import annotations

import torch

from ...comm.dispatch import Exchange
from ...layers.attention import AttentionSizes
from ...layers.attention.plan import AttentionPlan, LayerCache
from ...layers.candidate_selector import SelectorSizes
from ...layers.kernels import Kernels
from ...layers.mlp import MLPSizes
from ...layers.params import Scope
from ...layers.probe import Probe
from ...layers.rope import RopeTable
from ...layers.stages import Stages
from ...layers.suffix_conv import ConvSizes, SuffixConv
from ...parallel.groups import Groups
from ..checkpoint.config_file import or_default
from ..checkpoint.config_keys import ConfigKeys
from ..model_config import positive, within
from ..models.decoder import DecoderLayer
from ..models.decoder_config import DecoderConfig
from ..models.decoder_spec import Parts

CONVOLVED = ("attention_conv", "mlp_conv")
MAX_RANK = 1 << 16


class ConvolvedLayer(DecoderLayer):
    """A dense layer whose sublayers read and write through convolutions."""

    def __init__(
        self,
        source: Scope,
        attention: AttentionSizes,
        ffn: MLPSizes,
        eps: float,
        rope: RopeTable,
        groups: Groups,
        kernels: Kernels,
        layer: int,
        conv: ConvSizes,
    ) -> None:
        super().__init__(source, attention, ffn, eps, rope, groups, kernels, layer, all_to_all=False)
        self._around_attention, self._around_mlp = (SuffixConv(source.scope(n), conv, kernels) for n in CONVOLVED)

    def stages(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        exchange: Exchange,
        probe: Probe,
    ) -> Stages[torch.Tensor]:
        """See :meth:`..models.decoder.DecoderLayer.stages`; the rows [T, D] are those of whole blocks."""
        rows, kernels = self._around_attention.enter(self._attn_norm(x))
        y = yield from self.attention.stages(rows, cache, plan, exchange.start_sum, probe)
        x = x + self._around_attention.leave(y, kernels)
        rows, kernels = self._around_mlp.enter(self._ffn_norm(x))
        y = yield from self._mlp.stages(rows, exchange.start_sum)
        return x + self._around_mlp.leave(y, kernels)


def read_refinement(
    own: ConfigKeys, top: ConfigKeys, layers: DecoderConfig, width: int
) -> tuple[SelectorSizes, ConvSizes]:
    """The sizes of selector and convolutions from the keys of ``dflash_config``, else from the ``top``.

    Raises ``ValueError`` for what is not built: blocks whose rows see only earlier ones, scaled embeddings.
    """

    def sizes(*names: str) -> list[int]:
        return [own.required_int(name) if name in own else top.required_int(name) for name in names]

    def number(name: str, default: float) -> float:
        return or_default((own if name in own else top).optional_float(name), default)

    rank, top_k, taps, group_size = sizes("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
    within("selector_rank", rank, 1, MAX_RANK)
    within("selector_top_k", top_k, 1, layers.vocab_size)
    within("conv_kernel_size", taps, 1, width)
    within("conv_group_size", group_size, 1, layers.hidden_size)
    if layers.hidden_size % group_size:
        raise own.error(f"conv_group_size {group_size} does not divide hidden_size {layers.hidden_size}")
    slides = any(attention.window for attention in layers.attention)
    if or_default(top.optional_bool("is_causal"), slides):
        raise top.error("is_causal is not false, but only blocks whose rows see each other are supported")
    if number("input_embedding_scale", 1.0) != 1.0:
        raise own.error("input_embedding_scale is not 1, which is not supported")
    multiplier, softcap = number("output_multiplier", 1.0), number("final_logit_softcapping", 0.0)
    positive("output_multiplier", multiplier, 1e6)
    if not 0 <= softcap <= 1e6:
        raise own.error(f"final_logit_softcapping is {softcap}, outside [0, 1e6]")
    return SelectorSizes(rank, top_k, multiplier, softcap), ConvSizes(layers.hidden_size, taps, group_size, width)


def refinement_parts(selector: SelectorSizes, conv: ConvSizes, layers: DecoderConfig) -> Parts:
    """The tensors that a DFlash 2 folder holds besides those of a DFlash draft."""
    hidden, vocab = layers.hidden_size, layers.vocab_size
    parts: Parts = {"candidate_selector.hidden_projection.weight": ((selector.rank, hidden), "plain")}
    for name in ("predecessor", "successor"):
        parts[f"candidate_selector.{name}_codebook"] = ((vocab, selector.rank), "plain")
    for layer in range(layers.num_layers):
        for name in CONVOLVED:
            parts[f"layers.{layer}.{name}.base_kernel"] = ((2, conv.taps, hidden), "plain")
            parts[f"layers.{layer}.{name}.kernel_projection.weight"] = ((conv.num_kernels, hidden), "linear")
    return parts
