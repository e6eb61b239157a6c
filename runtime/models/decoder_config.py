"""What a plain decoder is: pre-norm layers with one residual stream, each an attention and a feed-forward layer."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from ...layers.attention import AttentionSizes
from ...layers.mlp import MLPSizes
from ...layers.moe import MoESizes
from ...layers.rope import Llama3, Yarn
from ..checkpoint.spec import TensorSpec
from ..model_config import LIMITS, QuantizationConfig, check_expert_blocks, positive, within


@dataclasses.dataclass(frozen=True)
class DecoderRope:
    """Rotary settings: the base ``theta``, how frequencies are scaled, and what cos and sin are multiplied by."""

    theta: float
    scaling: Yarn | Llama3 | None = None
    magnitude: float = 1.0


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder; raises ``ValueError`` on contradictions and on sizes beyond :data:`~..model_config.LIMITS`.

    ``attention`` and ``ffn`` have one entry per layer. ``tied``: the head is the embedding. ``draft_ffn``: the
    feed-forward sizes of the prediction layers a checkpoint brings, which attend like the last layer.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    attention: tuple[AttentionSizes, ...]
    ffn: tuple[MLPSizes | MoESizes, ...]
    rope: DecoderRope
    tied: bool
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str
    quantization: QuantizationConfig | None = None
    num_nextn_predict_layers: int = 0

    dspark: ClassVar[None] = None
    num_hash_layers: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "max_position_embeddings", "num_nextn_predict_layers"):
            within(name, getattr(self, name), *LIMITS[name])
        assert len(self.ffn) == self.num_layers
        positive("rms_norm_eps", self.rms_norm_eps, 1.0)
        if not (math.isfinite(self.rope.theta) and 1 < self.rope.theta <= 1e12):
            raise ValueError(f"rope_theta is {self.rope.theta}, outside (1, 1e12]")
        within("num_attention_heads", self.num_heads, *LIMITS["num_heads"])
        for attention in self.attention:
            within("head_dim", attention.head_dim, *LIMITS["head_dim"])
            within("the rotated channels of a head", attention.rope_dim, *LIMITS["rope_dim"])
            if attention.rope_dim % 2:
                raise ValueError(f"{attention.rope_dim} channels of a head are rotated, but rotation works on pairs")
        for ffn in self.ffn:
            within("the width of a feed-forward layer", ffn.width, 1, LIMITS["moe_intermediate_size"][1])
        if self.num_experts:
            within("n_routed_experts", self.num_experts, *LIMITS["num_experts"])
            within("num_experts_per_tok", self.num_experts_per_tok, 1, self.num_experts)
            check_expert_blocks("num_layers", self.num_layers, self.num_experts)
        tokens = {"bos_token_id": self.bos_token_id, "pad_token_id": self.pad_token_id}
        tokens |= {f"eos_token_ids[{index}]": token for index, token in enumerate(self.eos_token_ids)}
        for name, token in tokens.items():
            if token is not None:
                within(f"{name} (vocab_size is {self.vocab_size})", token, 0, self.vocab_size - 1)

    @property
    def num_layers(self) -> int:
        """Layers of the target."""
        return len(self.attention)

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        return self.attention[0].num_heads

    @property
    def num_key_heads(self) -> int:
        """Key heads that are cut over ranks; 1 where all heads share one."""
        return self.attention[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a query head."""
        return self.attention[0].head_dim

    @property
    def routed(self) -> MoESizes | None:
        """The sizes of the mixtures of experts, which are alike; None in a dense model."""
        return next((ffn for ffn in self.ffn if isinstance(ffn, MoESizes)), None)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer that has any; 0 in a dense model."""
        return self.routed.num_experts if self.routed else 0

    @property
    def num_experts_per_tok(self) -> int:
        """Experts that a token uses; 0 in a dense model."""
        return self.routed.top_k if self.routed else 0

    @property
    def num_draft_stages(self) -> int:
        """Prediction layers that the config announces."""
        return self.num_nextn_predict_layers

    @property
    def head_name(self) -> str:
        """The canonical name of the tensor that gives the logits."""
        return "embed.weight" if self.tied else "head.weight"

    def tensors(self, with_draft: bool) -> dict[str, TensorSpec]:
        """See :meth:`..model_config.Config.tensors`."""
        from .decoder_spec import decoder_tensors

        return decoder_tensors(self, with_draft)

    def rename(self, name: str) -> str:
        """See :meth:`..model_config.Config.rename`."""
        from .decoder_spec import decoder_name

        return decoder_name(name, self)

    def routed_blocks(self, with_draft: bool) -> list[tuple[str, int]]:
        """The canonical names of the blocks that route, and how many experts each has."""
        blocks = [(f"layers.{n}", ffn.num_experts) for n, ffn in enumerate(self.ffn) if isinstance(ffn, MoESizes)]
        stages = range(self.num_draft_stages if with_draft and isinstance(self.ffn[-1], MoESizes) else 0)
        return blocks + [(f"mtp.{stage}", self.num_experts) for stage in stages]
