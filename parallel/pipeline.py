"""Which layers each pipeline stage runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def stage_layers(num_layers: int, pp: int, partition: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layers of every stage, in order: equal shares, with one more for each of the last ``num_layers % pp`` stages.

    The last stages rather than the first, so that the one that also embeds is not the longest; with fewer layers than
    stages the first ones are empty. ``partition`` gives the number of layers of each stage instead. Raises
    ``ValueError`` when it does not fit.
    """
    if num_layers < 0 or pp < 1:
        raise ValueError(f"cannot split {num_layers} layers into {pp} stages")
    if partition is None:
        share, longer = divmod(num_layers, pp)
        partition = [share + (stage >= pp - longer) for stage in range(pp)]
    if len(partition) != pp:
        raise ValueError(f"the partition {list(partition)} has {len(partition)} stages, but pp = {pp}")
    if min(partition) < 0 or sum(partition) != num_layers:
        raise ValueError(
            f"the partition {list(partition)} holds {sum(partition)} layers, but the model has {num_layers}"
        )
    starts = [sum(partition[:stage]) for stage in range(pp + 1)]
    return tuple(range(a, b) for a, b in zip(starts, starts[1:]))
