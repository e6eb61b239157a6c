"""Counts of what was drafted, verified and kept: the ``spec`` fields of a request, and totals over many.

A verify step is one target forward for a request behind its prefill, with 0..γ drafts. Lengths count every emitted
token, so plain decoding has accepted length 1 and a block of γ at most γ + 1.
"""

from __future__ import annotations

from typing import Any


class SpecStats:
    """Counters of one request, or of many added together."""

    def __init__(self, gamma: int) -> None:
        """``gamma``: the most drafts a block can have, one after the other."""
        self.gamma = gamma
        self.verify_ct = 0
        self.emitted = 0
        self.drafted = 0
        self.verified = 0
        self.accepted = 0
        self.histogram = [0] * (gamma + 1)
        """Verify steps by the number of drafts kept."""
        self.judged = [0] * gamma
        """Steps in which draft k (one of depth k, in a tree) was verified and all before it were kept."""
        self.kept = [0] * gamma
        """Steps in which draft k was kept."""

    def add_step(self, drafted: int, verified: int, accepted: int, emitted: int) -> None:
        """Count one verify step, with the numbers that held after any cut; of a tree all drafted and verified nodes.

        Behind a stop (``emitted <= accepted``) nothing was judged, so a cut block does not lower acceptance.
        """
        if not verified and emitted == 1:  # as in every step where nothing is drafted
            self.verify_ct += 1
            self.emitted += 1
            self.drafted += drafted
            self.histogram[0] += 1
            return
        assert 0 <= accepted <= verified <= drafted and accepted <= self.gamma and 1 <= emitted <= accepted + 1
        self.verify_ct += 1
        self.emitted += emitted
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        self.histogram[accepted] += 1
        cut_short = emitted <= accepted
        for k in range(accepted if cut_short else min(accepted + 1, verified, self.gamma)):
            self.judged[k] += 1
        for k in range(accepted):
            self.kept[k] += 1

    def add(self, other: SpecStats) -> None:
        """Add another request's counts. Raises ``ValueError`` on another γ."""
        if other.gamma != self.gamma:
            raise ValueError(f"statistics of blocks of {self.gamma} and of {other.gamma} drafts do not add up")
        for name in ("verify_ct", "emitted", "drafted", "verified", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("histogram", "judged", "kept"):
            setattr(self, name, [a + b for a, b in zip(getattr(self, name), getattr(other, name))])

    def fields(self) -> dict[str, Any]:
        """The ``spec`` object of a result.

        ``accept_length`` = emitted tokens per verify step, ``accept_rate`` = accepted / verified drafts (0 for none),
        ``accept_histogram[n]`` = steps that kept n drafts.
        """
        return {
            "verify_ct": self.verify_ct,
            "accept_length": self.emitted / self.verify_ct if self.verify_ct else 0.0,
            "accept_rate": self.accepted / self.verified if self.verified else 0.0,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "accept_histogram": list(self.histogram),
        }

    def conditional_acceptance(self) -> list[float]:
        """[γ] how often draft k was kept when it was verified and all before it were kept; NaN where that never was."""
        return [kept / judged if judged else float("nan") for kept, judged in zip(self.kept, self.judged)]
