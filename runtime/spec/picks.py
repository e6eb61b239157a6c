"""How a draft chooses its tokens: the highest logit, or a draw, place by place along the block.

Shapes: B requests, γ drafts a block, V vocabulary. A pick is called as ``pick(k, logits)`` with ``logits`` [B, V] for
place k = 0..γ-1 and gives the tokens [B] and the law [B, V] they were drawn from. Verification must be given that
same law.
"""

from __future__ import annotations

from torch import Tensor

from ..sampling import SamplingRows, draw, target_probs


def greedy_pick(k: int, logits: Tensor) -> tuple[Tensor, None]:
    """The highest logit, the lowest id on a tie. Its law has one point, written as ``None``."""
    return logits.argmax(dim=-1), None


class SampledPick:
    """Draws from the law of ``rows`` (B rows; those at temperature 0 are greedy), one uniform a place.

    Any law is lossless. The nearer it is to the target's, the more is kept, so the requests' own temperature and
    filters are the natural choice. ``uniforms`` [B, γ] float64 in [0, 1) come from the draft's own random stream.
    """

    def __init__(self, rows: SamplingRows, uniforms: Tensor) -> None:
        self.rows, self.uniforms = rows, uniforms

    def __call__(self, k: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] and their law [B, V] float64."""
        probs = target_probs(logits, self.rows)
        return draw(probs, self.uniforms[:, k]), probs
