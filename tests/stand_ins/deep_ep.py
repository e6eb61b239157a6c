"""A stand-in for the library deep_ep: its signatures, limits and rules of order, on CPU ranks with real collectives.

Only what a user sees is imitated. Where the library would hang, read garbage or abort a kernel, this raises
:class:`Misuse`, and data that may not be read yet is NaN. ``limits`` holds the limits; a test may lower the number of
ranks of a node, which is 8 in the library, so that a few ranks are several nodes.
"""

import deep_ep_limits as limits
import torch
from deep_ep_elastic import ElasticBuffer, EPHandle
from deep_ep_legacy import Buffer
from deep_ep_parts import Config, EventOverlap, Misuse

__version__ = "2.1.0"
topk_idx_t = torch.int64
__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventOverlap", "Misuse", "limits", "topk_idx_t"]
