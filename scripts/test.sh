#!/usr/bin/env bash
# Lint, then the tests; arguments go to pytest.
#
#   bash scripts/test.sh
#   bash scripts/test.sh tests/runtime -k sampling
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare dev,cpu

cd "$ROOT"
"$PYTHON" -m ruff check .
exec "$PYTHON" -m pytest "$@"
