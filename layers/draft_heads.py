"""The light heads of a DSpark draft: a Markov head that lets a block's places see each other, and a confidence head.

Shapes: B blocks, γ places, d hidden size, r Markov rank, V vocabulary. Source: paper sections 3.1 and 3.2.1.

The token before place k (``prev``) is the anchor x_0 at the first place and draft x_k behind it; the head is applied
at the first place too. Everything is plain torch without in-place writes, so the same code runs in inference and
under autograd. The sum of base logits and bias, and the confidence, are taken in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from .params import ParamSource

Pick = Callable[[int, Tensor], tuple[Tensor, Tensor | None]]
"""``pick(k, logits [B, V])`` chooses the tokens [B] of place k and gives the law [B, V] they were drawn from."""


class MarkovHead(Protocol):
    """Turns the previous token (and, by kind, the hidden state and the block's past) into a bias on the logits.

    bias = W2·f, with f [r] from :meth:`step`; W1 [V, r] embeds the previous token, W2 [V, r] reads f out.
    """

    kind: str
    weights: dict[str, Tensor]
    """By their names in a checkpoint, below the head's prefix."""

    def begin(self, hidden: Tensor) -> Any:
        """The state at the start of blocks with ``hidden`` [B, γ, d]: what can be computed for all places at once."""
        ...

    def step(self, k: int | slice, prev: Tensor, state: Any) -> tuple[Tensor, Any]:
        """f [B, r] of place ``k`` behind tokens ``prev`` [B], and the next state.

        Heads without memory also take ``k = slice(None)`` and ``prev`` [B, γ], for all places at once.
        """
        ...


class VanillaHead:
    """f = W1[prev]."""

    kind = "vanilla"
    recurrent = False

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)

    @staticmethod
    def shapes(vocab_size: int, rank: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights."""
        return {"markov_w1.weight": (vocab_size, rank), "markov_w2.weight": (vocab_size, rank)}

    def begin(self, hidden: Tensor) -> None:
        """See :class:`MarkovHead`."""

    def step(self, k: int | slice, prev: Tensor, state: None) -> tuple[Tensor, None]:
        """See :class:`MarkovHead`."""
        return embedding(prev, self.weights["markov_w1.weight"]), None


class GatedHead:
    """f = σ(G[h_k; e])·e with e = W1[prev]; G [r, d + r] has a bias."""

    kind = "gated"
    recurrent = False

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)

    @staticmethod
    def shapes(vocab_size: int, rank: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights."""
        return VanillaHead.shapes(vocab_size, rank, hidden_size) | {
            "gate_proj.weight": (rank, hidden_size + rank),
            "gate_proj.bias": (rank,),
        }

    def begin(self, hidden: Tensor) -> Tensor:
        """See :class:`MarkovHead`: the hidden states' share of the gate, [B, γ, r]."""
        gate = self.weights["gate_proj.weight"]
        return hidden.to(gate.dtype) @ gate[:, : hidden.shape[-1]].T + self.weights["gate_proj.bias"]

    def step(self, k: int | slice, prev: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`MarkovHead`."""
        gate = self.weights["gate_proj.weight"]
        e = embedding(prev, self.weights["markov_w1.weight"])
        return torch.sigmoid(state[:, k] + e @ gate[:, -e.shape[-1] :].T) * e, state


class RnnState(NamedTuple):
    """State of :class:`RnnHead` inside a block."""

    hidden_part: Tensor
    """[B, γ, 3r] the hidden states' share of the projection."""
    s: Tensor
    """[B, r] the memory, 0 at the start of a block."""


class RnnHead:
    """f = tanh(o), with [g; c; o] = J[s; e; h_k] from the old memory s; then s becomes σ(g)·s + (1 - σ(g))·tanh(c).

    J [3r, 2r + d] has a bias.
    """

    kind = "rnn"
    recurrent = True

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)

    @staticmethod
    def shapes(vocab_size: int, rank: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights."""
        return VanillaHead.shapes(vocab_size, rank, hidden_size) | {
            "joint_proj.weight": (3 * rank, 2 * rank + hidden_size),
            "joint_proj.bias": (3 * rank,),
        }

    def begin(self, hidden: Tensor) -> RnnState:
        """See :class:`MarkovHead`."""
        joint = self.weights["joint_proj.weight"]
        rank = joint.shape[0] // 3
        part = hidden.to(joint.dtype) @ joint[:, 2 * rank :].T + self.weights["joint_proj.bias"]
        return RnnState(part, part.new_zeros(part.shape[0], rank))

    def step(self, k: int | slice, prev: Tensor, state: RnnState) -> tuple[Tensor, RnnState]:
        """See :class:`MarkovHead`."""
        joint = self.weights["joint_proj.weight"]
        rank = joint.shape[0] // 3
        past = torch.cat([state.s, embedding(prev, self.weights["markov_w1.weight"])], dim=-1)
        gate, candidate, output = (state.hidden_part[:, k] + past @ joint[:, : 2 * rank].T).split(rank, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), RnnState(state.hidden_part, keep * state.s + (1.0 - keep) * torch.tanh(candidate))


MARKOV_HEADS: dict[str, type[VanillaHead] | type[GatedHead] | type[RnnHead]] = {
    head.kind: head for head in (VanillaHead, GatedHead, RnnHead)
}


class ConfidenceHead:
    """z_k = w·[h_k; W1[prev]] + b, or without the embedding; c_k = σ(z_k) estimates that draft k survives.

    ``weight`` [1, d + r] or [1, d], ``bias`` [1] or ``None``. Reads the token *before* place k, never the draft at k.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def logits(self, hidden: Tensor, prev: Tensor, markov_w1: Tensor | None) -> Tensor:
        """z [B, γ] from ``hidden`` [B, γ, d] and the previous tokens ``prev`` [B, γ].

        ``markov_w1`` [V, r] may be ``None`` when the head does not read the embedding.
        """
        hidden_size = hidden.shape[-1]
        weight = self.weight[0].to(torch.promote_types(self.weight.dtype, torch.float32))
        z = hidden.to(weight.dtype) @ weight[:hidden_size]
        if weight.shape[0] > hidden_size:
            assert markov_w1 is not None, "this confidence head reads the Markov embedding"
            z = z + embedding(prev, markov_w1).to(weight.dtype) @ weight[hidden_size:]
        return z if self.bias is None else z + self.bias.to(weight.dtype)


class DraftBlock(NamedTuple):
    """What the heads made of a block."""

    tokens: Tensor
    """[B, γ] int64."""
    probs: Tensor | None
    """[B, γ, V] the laws the tokens were drawn from, ``None`` for greedy choices."""
    confidence_logits: Tensor | None
    """[B, γ], ``None`` without a confidence head."""


def draw_block(
    base_logits: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    head: MarkovHead | None,
    confidence: ConfidenceHead | None,
    pick: Pick,
) -> DraftBlock:
    """Choose the drafts of B blocks left to right, each from base logits plus the bias of the token before it.

    Args:
        base_logits: [B, γ, V], row k for draft x_{k+1}; ``hidden`` [B, γ, d] the states that the heads read.
        anchors: [B] int64, x_0.
        head: ``None`` leaves the places independent.
        pick: see :data:`Pick`; all laws or none.
    """
    base = base_logits.to(torch.promote_types(base_logits.dtype, torch.float32))
    state = None if head is None else head.begin(hidden)
    readout = None if head is None else head.weights["markov_w2.weight"].T
    prev, tokens, laws = anchors, [], []
    for k in range(base.shape[1]):
        logits = base[:, k]
        if head is not None:
            feature, state = head.step(k, prev, state)
            logits = logits + feature @ readout
        prev, law = pick(k, logits)
        tokens.append(prev)
        laws.append(law)
    drafts = torch.stack(tokens, dim=1)
    conf = None
    if confidence is not None:
        w1 = None if head is None else head.weights["markov_w1.weight"]
        conf = confidence.logits(hidden, previous_tokens(anchors, drafts), w1)
    return DraftBlock(drafts, None if laws[0] is None else torch.stack(laws, dim=1), conf)


def previous_tokens(anchors: Tensor, tokens: Tensor) -> Tensor:
    """[B, γ] the token before each place: ``anchors`` [B], then ``tokens`` [B, γ] without the last."""
    return torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)


def teacher_forced_logits(base_logits: Tensor, hidden: Tensor, prev: Tensor, head: MarkovHead | None) -> Tensor:
    """[B, γ, V] the logits that :func:`draw_block` would see if the drafts were ``prev`` [B, γ] (shifted by one).

    Differentiable in base logits, hidden states and the head's weights.
    """
    base = base_logits.to(torch.promote_types(base_logits.dtype, torch.float32))
    if head is None:
        return base
    state = head.begin(hidden)
    if head.recurrent:
        features = []
        for k in range(prev.shape[1]):
            feature, state = head.step(k, prev[:, k], state)
            features.append(feature)
        stacked = torch.stack(features, dim=1)
    else:
        stacked, _ = head.step(slice(None), prev, state)
    return base + stacked @ head.weights["markov_w2.weight"].T


def make_markov_head(kind: str, weights: Mapping[str, Tensor], hidden_size: int) -> MarkovHead:
    """The head of ``kind`` on given weights (see its ``shapes``), which may require gradients.

    Raises ``ValueError`` for an unknown kind, a missing, unexpected or misshapen weight.
    """
    cls = _head_class(kind)
    vocab_size, rank = weights["markov_w1.weight"].shape if "markov_w1.weight" in weights else (0, 0)
    shapes = cls.shapes(vocab_size, rank, hidden_size)
    for name in sorted(set(shapes) ^ set(weights)):
        what = "is missing" if name in shapes else "does not belong to it"
        raise ValueError(f"the {kind} Markov head: {name} {what}")
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"the {kind} Markov head: {name} has shape {tuple(weights[name].shape)}, needs {shape}")
    return cls(weights)


def load_markov_head(
    kind: str, source: ParamSource, hidden_size: int, embed: str = "markov_w1", output: str = "markov_w2"
) -> MarkovHead:
    """The head of ``kind`` from the names below ``source``; ``embed`` and ``output`` are the file's names of W1, W2."""
    renamed = {"markov_w1.weight": f"{embed}.weight", "markov_w2.weight": f"{output}.weight"}
    names = _head_class(kind).shapes(0, 0, 0)
    return make_markov_head(kind, {name: source.take(renamed.get(name, name)) for name in names}, hidden_size)


def load_confidence_head(source: ParamSource, has_bias: bool) -> ConfidenceHead:
    """The head's ``proj`` below ``source``, in float32; V4 drafts have no bias, dense ones do."""
    weight = source.take("proj.weight", dtype=torch.float32)
    return ConfidenceHead(weight, source.take("proj.bias", dtype=torch.float32) if has_bias else None)


def init_markov_weights(
    kind: str, vocab_size: int, rank: int, hidden_size: int, generator: torch.Generator, std: float = 0.02
) -> dict[str, Tensor]:
    """Fresh float32 weights on the generator's device: normal with ``std``, biases 0, and W2 0.

    With W2 at 0 the draft starts as one without a Markov head.
    """
    weights = {}
    for name, shape in _head_class(kind).shapes(vocab_size, rank, hidden_size).items():
        weights[name] = torch.zeros(shape, device=generator.device)
        if not name.endswith("bias") and name != "markov_w2.weight":
            weights[name].normal_(std=std, generator=generator)
    return weights


def _head_class(kind: str) -> type[VanillaHead] | type[GatedHead] | type[RnnHead]:
    if kind not in MARKOV_HEADS:
        raise ValueError(f"unknown Markov head {kind!r}; known: {', '.join(MARKOV_HEADS)}")
    return MARKOV_HEADS[kind]
