"""torchrun, whose agent ends at once when its ranks have failed: ``python -m dspark.parallel.agent`` with its options.

The agent has torch loaded, which a busy machine takes seconds to unload in order, in the midst of a failure. Agents
that do not meet say so in one line.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback


def main() -> None:
    """Run torchrun with the options of the command line."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun
    from torch.distributed.run import parse_args

    options = parse_args(sys.argv[1:])
    where = f"{options.master_addr}:{options.master_port}"
    try:
        socket.getaddrinfo(options.master_addr, options.master_port)
        torchrun()
    except socket.gaierror as error:
        _end(2, f"dspark: error: node {options.node_rank}: the host of {where} has no address here ({error})")
    except DistError as error:
        _end(
            2,
            f"dspark: error: node {options.node_rank}: the agents of {options.nnodes} nodes did not meet at {where} "
            f"({str(error).splitlines()[0]}); have all been started, and is node 0 at that address?",
        )
    except SignalException as error:
        _end(128 + error.sigval, f"dspark: torchrun's agent was ended by {error.sigval.name}")
    except ChildFailedError as error:
        _end(1, str(error))  # a list of the ranks
    except Exception:
        _end(1, traceback.format_exc())


def _end(status: int, text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
