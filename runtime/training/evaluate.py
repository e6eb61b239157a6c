"""How much of a draft a target would accept, measured on held-out sequences behind the data's own tokens.

Legend: A anchors, γ places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .batches import Batch, build_batch, counter_seed
from .hidden_cache import HiddenData

Drafts = Callable[[Batch], tuple[Tensor, Tensor]]
"""``drafts(batch)`` -> draft and target logits, both [A, γ, V], for the same labels."""


class PlaceSums(NamedTuple):
    """Sums over blocks, each [γ].

    ``places``: valid ones. ``greedy``: blocks whose first k choices are all the target's. ``expected``: chances that
    the first k sampled drafts are all accepted. ``overlap``: Σ min(p, q) of the place alone.
    """

    places: Tensor
    greedy: Tensor
    expected: Tensor
    overlap: Tensor

    def report(self) -> dict[str, object]:
        """Means by place, and the accepted lengths they give (with the target's own token)."""
        count = self.places.clamp(min=1.0)
        means = {name: getattr(self, name) / count for name in ("greedy", "expected", "overlap")}
        result: dict[str, object] = {name: [round(x, 4) for x in mean.tolist()] for name, mean in means.items()}
        result["greedy_length"] = round(1.0 + float(means["greedy"].sum()), 4)
        result["expected_length"] = round(1.0 + float(means["expected"].sum()), 4)
        result["blocks"] = int(self.places[0])
        return result


def place_sums(draft_logits: Tensor, target_logits: Tensor, valid: Tensor) -> PlaceSums:
    """The sums of one batch; ``valid`` bool [A, γ] falls once. Float64 [γ] on the CPU."""
    overlap = torch.minimum(draft_logits.float().softmax(-1), target_logits.float().softmax(-1)).sum(-1)
    same = (draft_logits.argmax(-1) == target_logits.argmax(-1)) & valid
    overlap = overlap * valid
    sums = (valid, same.cumprod(1), overlap.cumprod(1), overlap)
    return PlaceSums(*(each.double().sum(0).cpu() for each in sums))


@torch.no_grad()
def evaluate_drafts(
    drafts: Drafts,
    data: HiddenData,
    gamma: int,
    device: torch.device,
    *,
    anchors_per_source: int = 1024,
    anchors_per_batch: int = 256,
    seed: int = 0,
) -> dict[str, dict[str, object]]:
    """:meth:`PlaceSums.report` by source, over the same anchors whatever the draft."""
    result = {}
    for number, source in enumerate(sorted(set(data.sources))):
        wanted = [q for q, name in enumerate(data.sources) if name == source]
        total, done = None, 0
        for part in _parts(data, wanted, 4096):
            batch = build_batch(data, part, anchors_per_batch, gamma, counter_seed(seed, number, done)).to(device)
            if not len(batch.anchors):
                continue
            sums = place_sums(*drafts(batch), batch.valid)
            total = sums if total is None else PlaceSums(*(a + b for a, b in zip(total, sums)))
            done += len(batch.anchors)
            if done >= anchors_per_source:
                break
        if total is not None:
            result[source] = total.report()
    return result


def _parts(data: HiddenData, sequences: Sequence[int], num_tokens: int) -> list[list[int]]:
    """``sequences`` in parts of about ``num_tokens`` tokens."""
    lengths = data.starts.diff()
    parts: list[list[int]] = [[]]
    held = 0
    for q in sequences:
        if held >= num_tokens:
            parts.append([])
            held = 0
        parts[-1].append(q)
        held += int(lengths[q])
    return parts
