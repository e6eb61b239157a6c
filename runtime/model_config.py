"""What a DeepSeek-V4-style model is: sizes, layer kinds, rotary settings, router, residual streams, bundled draft.

A :class:`ModelConfig` is frozen and complete: nothing is left to a library's defaults, because the libraries that read
these files disagree about them (``compress_rope_theta``, the maximal position, the layer pattern). The dialects of
``config.json`` are read by :mod:`.checkpoint.config_file`; every check that does not need the file's own key names is
made here, so a config built by hand is checked as well.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from .checkpoint.spec import TensorSpec

ScoringFunc = Literal["sqrtsoftplus", "sigmoid", "softmax"]
LayerKind = Literal["sliding", "csa", "hca"]

SCORING_FUNCS: tuple[str, ...] = ("sqrtsoftplus", "sigmoid", "softmax")
LAYER_KINDS: tuple[str, ...] = ("sliding", "csa", "hca")
MARKOV_HEAD_TYPES: tuple[str, ...] = ("vanilla", "gated", "rnn")
HC_KINDS: tuple[str, ...] = ("mhc", "hc")

# The largest values that are believed: (smallest, largest). About four times the largest released model, or more.
LIMITS: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 2**21),
    "hidden_size": (1, 2**16),
    "num_layers": (1, 512),
    "num_heads": (1, 1024),
    "head_dim": (1, 4096),
    "rope_dim": (2, 4096),
    "q_lora_rank": (1, 2**16),
    "o_groups": (1, 1024),
    "o_lora_rank": (1, 2**16),
    "index_num_heads": (1, 1024),
    "index_head_dim": (1, 4096),
    "index_topk": (1, 2**20),
    "num_experts": (1, 4096),
    "num_experts_per_tok": (1, 256),
    "num_shared_experts": (1, 1),
    "moe_intermediate_size": (1, 2**17),
    "sliding_window": (1, 2**17),
    "hc_mult": (1, 16),
    "hc_sinkhorn_iters": (1, 1000),
    "max_position_embeddings": (1, 2**27),
    "num_nextn_predict_layers": (0, 16),
}
MAX_EXPERT_BLOCKS = 2**16  # routed experts of all layers together
MAX_COMPRESS_RATIO = 4096


class Config(Protocol):
    """What the runtime needs to know of any model; each family has its own class."""

    model_type: ClassVar[str] | str
    """A key of :data:`.models.MODELS`."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    """Key heads that are cut over the ranks of an attention block; 1 where all share one."""
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    """Layers whose router goes by token id."""
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_nextn_predict_layers: int
    num_draft_stages: int
    dspark: DSparkConfig | None
    quantization: QuantizationConfig | None

    def routed_blocks(self, with_draft: bool) -> list[tuple[str, int]]:
        """The canonical names of the blocks that route, and how many experts each has."""
        ...

    def tensors(self, with_draft: bool) -> dict[str, TensorSpec]:
        """Canonical name -> what it must be, for the target and, if wanted and announced, its draft."""
        ...

    def rename(self, name: str) -> str:
        """A canonical name once more, where this model has names of its own."""
        ...


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """Yarn scaling of the inverse frequencies; cos and sin are not multiplied by any factor.

    ``factor`` (> 0), ``original_max_position`` (positions the frequencies were trained for), ``beta_fast`` and
    ``beta_slow`` (turns at which the ramp between the two spectra begins and ends).
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary settings of one kind of layer: the base ``theta`` and, or ``None`` for plain frequencies, ``yarn``."""

    theta: float
    yarn: YarnConfig | None = None


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """What ``config.json`` says about block-scaled weights.

    ``block_shape`` is (rows, columns) of a scaled block of an FP8 weight, ``scale_format`` is ``"ue8m0"`` (powers of
    two) or ``"float32"``. Readers take the block shape from the grid of scales in the file; this is the claim.
    """

    block_shape: tuple[int, int]
    scale_format: str


@dataclasses.dataclass(frozen=True)
class DSparkConfig:
    """A DSpark draft that is bundled with the target in ``mtp.*`` tensors.

    ``block_size`` is gamma, the number of drafted tokens it was trained for; ``noise_token_id`` fills the block after
    the anchor; the completed outputs of the target's layers ``target_layer_ids`` (0-based) are its context, and there
    are as many draft stages as ids. ``sample_from_anchor=False`` means that the anchor's row predicts nothing.
    """

    block_size: int
    markov_rank: int
    markov_head_type: Literal["vanilla", "gated", "rnn"]
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    num_routed_experts: int
    num_experts_per_tok: int
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    sample_from_anchor: bool


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V4-style model; raises ``ValueError`` on contradictions and on sizes beyond :data:`LIMITS`.

    ``layer_kinds``, ``compress_ratios`` (tokens per compressed entry, 0 for sliding layers) and ``hash_layers`` (router
    by token id) have one entry per layer. Sliding layers use ``main_rope``; CSA and HCA layers use ``compress_rope``
    for everything: queries, sliding keys, compressed entries and indexer. ``dtype`` is the checkpoint's own, as
    ``config.json`` names it. ``num_nextn_predict_layers`` is kept as written; see :attr:`num_draft_stages`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    moe_intermediate_size: int
    scoring_func: ScoringFunc
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    swiglu_limit: float | None
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    main_rope: RopeConfig
    compress_rope: RopeConfig
    layer_kinds: tuple[LayerKind, ...]
    compress_ratios: tuple[int, ...]
    hash_layers: tuple[bool, ...]
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    num_nextn_predict_layers: int
    dtype: str
    quantization: QuantizationConfig | None = None
    expert_dtype: str | None = None
    dspark: DSparkConfig | None = None
    hc_kind: Literal["mhc", "hc"] = "mhc"

    model_type: ClassVar[str] = "deepseek_v4"
    num_key_heads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_layers(self)
        _check_rope("main_rope", self.main_rope)
        _check_rope("compress_rope", self.compress_rope)
        _check_numbers(self)
        if self.dspark is not None:
            _check_dspark(self.dspark, self)

    @property
    def num_draft_stages(self) -> int:
        """Blocks under ``mtp.*``: one per DSpark target layer, else one per plain multi-token prediction layer."""
        return len(self.dspark.target_layer_ids) if self.dspark is not None else self.num_nextn_predict_layers

    @property
    def num_hash_layers(self) -> int:
        """Layers whose router goes by token id."""
        return sum(self.hash_layers)

    def tensors(self, with_draft: bool) -> dict[str, TensorSpec]:
        """See :meth:`Config.tensors`."""
        from .checkpoint.spec import v4_tensors

        return v4_tensors(self, with_draft)

    def rename(self, name: str) -> str:
        """See :meth:`Config.rename`."""
        return name

    def routed_blocks(self, with_draft: bool) -> list[tuple[str, int]]:
        """The canonical names of the blocks that route, and how many experts each has."""
        blocks = [(f"layers.{layer}", self.num_experts) for layer in range(self.num_layers)]
        if with_draft:
            num_experts = self.num_experts if self.dspark is None else self.dspark.num_routed_experts
            blocks += [(f"mtp.{stage}", num_experts) for stage in range(self.num_draft_stages)]
        return blocks

    @classmethod
    def from_dict(cls, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
        """A config from the parsed ``config.json`` (HF nested, release flat, or ``inference/config.json`` names).

        ``generation`` is the parsed ``generation_config.json``, whose end-of-sequence ids are added. Raises
        ``ValueError`` naming the key on anything unknown, missing, contradictory or absurd.
        """
        from .checkpoint.config_file import model_config_from_dict

        return model_config_from_dict(config, generation)


def load_model_config(folder: str | pathlib.Path) -> Config:
    """The config of the checkpoint in ``folder`` (``config.json`` and, if present, ``generation_config.json``), of
    whatever model it is.

    Raises ``ValueError`` when a file is absent, too large, not strict JSON, or does not describe a model we can run.
    """
    from .checkpoint.config_file import read_config_files
    from .models import family, model_type

    config, generation = read_config_files(pathlib.Path(folder))
    return family(model_type(config)).read_config(config, generation)


def only_for(config: Config, model_type: str, what: str) -> None:
    """Raise ``ValueError`` if ``what`` was asked for another model than it is made for."""
    if config.model_type != model_type:
        raise ValueError(f"{what} works on {model_type} models, but this one is {config.model_type}")


def within(name: str, value: int, low: int, high: int) -> None:
    """Raise ``ValueError`` unless ``value`` is an integer in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r:.40}, outside [{low}, {high}]")


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r:.60}, not one of {', '.join(choices)}")


def positive(name: str, value: float, limit: float = math.inf) -> None:
    """Raise ``ValueError`` unless ``value`` is a positive number of at most ``limit``."""
    if not (math.isfinite(value) and 0 < value <= limit):
        raise ValueError(
            f"{name} is {value}, not a positive number" + (f" of at most {limit:g}" if limit < math.inf else "")
        )


def _check_sizes(config: ModelConfig) -> None:
    for name, (low, high) in LIMITS.items():
        within(name, getattr(config, name), low, high)
    if config.num_heads % config.o_groups:
        raise ValueError(f"num_heads {config.num_heads} is not a multiple of o_groups {config.o_groups}")
    if config.rope_dim % 2:
        raise ValueError(f"rope_dim is {config.rope_dim}, but rotation works on pairs of channels")
    for name in ("head_dim", "index_head_dim"):
        if config.rope_dim > getattr(config, name):
            raise ValueError(f"rope_dim {config.rope_dim} exceeds {name} {getattr(config, name)}")
    _check_top_k(config.num_experts_per_tok, config.num_experts)
    check_expert_blocks("num_layers", config.num_layers, config.num_experts)
    check_expert_blocks("num_nextn_predict_layers", config.num_nextn_predict_layers, config.num_experts)


def check_expert_blocks(name: str, layers: int, experts: int) -> None:
    """Raise ``ValueError`` if that many experts in that many layers are more than is believed."""
    if layers * experts > MAX_EXPERT_BLOCKS:
        raise ValueError(
            f"{name} {layers} x {experts} experts is {layers * experts} expert blocks, more than {MAX_EXPERT_BLOCKS}"
        )


def _check_top_k(top_k: int, num_experts: int) -> None:
    if top_k > num_experts:
        raise ValueError(f"num_experts_per_tok {top_k} exceeds the {num_experts} routed experts")


def _check_layers(config: ModelConfig) -> None:
    for name in ("layer_kinds", "compress_ratios", "hash_layers"):
        if len(getattr(config, name)) != config.num_layers:
            raise ValueError(f"{name} has {len(getattr(config, name))} entries but num_layers is {config.num_layers}")
    for layer, (kind, ratio) in enumerate(zip(config.layer_kinds, config.compress_ratios)):
        _one_of(f"layer_kinds[{layer}]", kind, LAYER_KINDS)
        if kind == "sliding":
            within(f"compress_ratios[{layer}] of a sliding layer", ratio, 0, 0)
        else:
            within(f"compress_ratios[{layer}] of a {kind} layer", ratio, 1, MAX_COMPRESS_RATIO)


def _check_rope(name: str, rope: RopeConfig) -> None:
    if not (math.isfinite(rope.theta) and 1 < rope.theta <= 1e12):
        raise ValueError(f"{name}.theta is {rope.theta}, outside (1, 1e12]")
    if rope.yarn is None:
        return
    if not (math.isfinite(rope.yarn.factor) and 1 <= rope.yarn.factor <= 1e6):
        raise ValueError(f"{name}: yarn factor is {rope.yarn.factor}, outside [1, 1e6]")
    within(
        f"{name}: yarn original_max_position", rope.yarn.original_max_position, 1, LIMITS["max_position_embeddings"][1]
    )
    positive(f"{name}: yarn beta_slow", rope.yarn.beta_slow, 1e6)
    positive(f"{name}: yarn beta_fast", rope.yarn.beta_fast, 1e6)
    if rope.yarn.beta_fast < rope.yarn.beta_slow:
        raise ValueError(f"{name}: yarn beta_fast {rope.yarn.beta_fast} is below beta_slow {rope.yarn.beta_slow}")


def _check_numbers(config: ModelConfig) -> None:
    _one_of("scoring_func", config.scoring_func, SCORING_FUNCS)
    _one_of("hc_kind", config.hc_kind, HC_KINDS)
    positive("routed_scaling_factor", config.routed_scaling_factor, 1e6)
    positive("rms_norm_eps", config.rms_norm_eps, 1.0)
    positive("hc_eps", config.hc_eps, 1.0)
    if config.swiglu_limit is not None:
        positive("swiglu_limit", config.swiglu_limit)
    tokens = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    tokens |= {f"eos_token_ids[{index}]": token for index, token in enumerate(config.eos_token_ids)}
    for name, token in tokens.items():
        if token is not None:
            within(f"{name} (vocab_size is {config.vocab_size})", token, 0, config.vocab_size - 1)


def _check_dspark(draft: DSparkConfig, config: ModelConfig) -> None:
    within("dspark block_size", draft.block_size, 1, 64)
    within("dspark markov_rank", draft.markov_rank, 0, 2**15)
    _one_of("dspark markov_head_type", draft.markov_head_type, MARKOV_HEAD_TYPES)
    within(f"dspark noise_token_id (vocab_size is {config.vocab_size})", draft.noise_token_id, 0, config.vocab_size - 1)
    within("dspark draft stages", len(draft.target_layer_ids), 1, LIMITS["num_nextn_predict_layers"][1])
    for index, layer in enumerate(draft.target_layer_ids):
        within(f"dspark target_layer_ids[{index}]", layer, 0, config.num_layers - 1)
    if list(draft.target_layer_ids) != sorted(set(draft.target_layer_ids)):
        raise ValueError(f"dspark target_layer_ids must rise strictly, got {list(draft.target_layer_ids)}")
    within("dspark num_routed_experts", draft.num_routed_experts, *LIMITS["num_experts"])
    within("dspark num_experts_per_tok", draft.num_experts_per_tok, *LIMITS["num_experts_per_tok"])
    _check_top_k(draft.num_experts_per_tok, draft.num_routed_experts)
    check_expert_blocks("dspark target_layer_ids", len(draft.target_layer_ids), draft.num_routed_experts)
    if draft.markov_rank == 0 and draft.markov_head_type != "vanilla":
        raise ValueError(f"dspark markov_head_type is {draft.markov_head_type!r} but markov_rank is 0")
    if draft.confidence_head_with_markov and draft.markov_rank == 0:
        raise ValueError("dspark confidence_head_with_markov is true but markov_rank is 0")
