"""From the verify mode that the user names to the policy that decides."""

from __future__ import annotations

import logging

from .async_policy import SLACK, AsyncPolicy
from .schedule import StaticPolicy, SyncPolicy, ThresholdPolicy, VerifyPolicy
from .sps import SpsTable

logger = logging.getLogger(__name__)


def make_policy(mode: str, sps: SpsTable | None = None, threshold: float | None = None) -> VerifyPolicy:
    """The policy of ``--verify mode``; ``threshold`` trims in static mode.

    Without a table nothing is trimmed, in any mode, and the log says so: with no measured cost extra rows would look
    free. Raises ``ValueError`` for an unknown mode, or a threshold outside static mode.
    """
    if mode not in ("static", "sync", "async"):
        raise ValueError(f"the verify mode must be static, sync or async, got {mode!r}")
    if mode == "static":
        return StaticPolicy() if threshold is None else ThresholdPolicy(threshold)
    if threshold is not None:
        raise ValueError(f"a confidence threshold ({threshold}) belongs to the verify mode static, not {mode}")
    if sps is None:
        logger.warning("verify mode %s has no SPS table: every draft is verified; measure one with profile-sps", mode)
        return StaticPolicy()
    return SyncPolicy(sps) if mode == "sync" else AsyncPolicy(sps, slack=SLACK)
