"""``python -m dspark.runtime VERB ...``: the same program as ``dspark``."""

import sys

from .cli import main

sys.exit(main())
