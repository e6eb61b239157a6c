"""Made-up expert loads for benchmarks and tests: counts drawn from uneven odds, the same for the same seed.

Shapes: S windows, L layers, E experts.
"""

from __future__ import annotations

import numpy as np

KINDS = ("logn0.8", "zipf0.9", "zipf1.2", "sparse", "hot1", "depth")
TOKENS = 400_000


def synthetic_loads(kind: str, num_layers: int, num_experts: int, seed: int = 0, tokens: int = TOKENS) -> np.ndarray:
    """Counts [L, E] int64 that sum to ``tokens`` in every layer.

    ``lognX``: odds log-normal with sigma X, close to what is known of real models at 0.8. ``zipfX``: odds of rank to
    the power -X. ``sparse``: a third of the experts idle. ``hot1``: one expert takes a fourth of all. ``depth``:
    log-normal, flat in the first layers and steep in the last.
    """
    rng = np.random.default_rng(seed)
    return _draw(_odds(kind, num_layers, num_experts, rng), tokens, rng)


def drifting_loads(
    num_windows: int, num_layers: int, num_experts: int, keep: float, seed: int = 0, tokens: int = TOKENS
) -> np.ndarray:
    """Counts [S, L, E] of log-normal odds (sigma 0.8) of which 40 % of the log variance wanders.

    ``keep`` is the correlation of the wandering part from one window to the next.
    """
    rng = np.random.default_rng(seed)
    size = (num_layers, num_experts)
    fixed, wanders = rng.normal(0, 0.8 * 0.6**0.5, size), rng.normal(0, 1, size)
    windows = []
    for _ in range(num_windows):
        windows.append(_draw(np.exp(fixed + 0.8 * 0.4**0.5 * wanders), tokens, rng))
        wanders = keep * wanders + (1 - keep**2) ** 0.5 * rng.normal(0, 1, size)
    return np.stack(windows)


def _odds(kind: str, num_layers: int, num_experts: int, rng: np.random.Generator) -> np.ndarray:
    size = (num_layers, num_experts)
    if kind.startswith("logn"):
        return np.exp(rng.normal(0, float(kind[4:]), size))
    if kind.startswith("zipf"):
        odds = (np.arange(num_experts) + 1.0) ** -float(kind[4:])
        return np.stack([rng.permutation(odds) for _ in range(num_layers)])
    odds = np.exp(rng.normal(0, 1, size))
    if kind == "sparse":
        return np.where(rng.random(size) < 1 / 3, 0.0, odds**1.2)
    if kind == "hot1":
        odds = odds**0.6
        hot = rng.integers(0, num_experts, num_layers)
        odds[np.arange(num_layers), hot] = odds.sum(1) / 3
        return odds
    if kind == "depth":
        return odds ** np.linspace(0.4, 1.4, num_layers)[:, None]
    raise ValueError(f"unknown kind of loads {kind!r}; there are {', '.join(KINDS)}")


def _draw(odds: np.ndarray, tokens: int, rng: np.random.Generator) -> np.ndarray:
    return np.stack([rng.multinomial(tokens, row / row.sum()) for row in odds])
