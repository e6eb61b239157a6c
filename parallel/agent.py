"""torchrun, whose agent ends at once when its ranks have failed: ``python -m dspark.parallel.agent`` with its options.

The agent has torch loaded, which a busy machine takes seconds to unload in order, in the midst of a failure.
"""

from __future__ import annotations

import os
import sys
import traceback


def main() -> None:
    """Run torchrun with the options of the command line."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun()
    except ChildFailedError as error:  # lists the ranks
        print(error, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    else:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
