#!/usr/bin/env bash
# Lint, then the tests, two at a time (DSPARK_TEST_WORKERS says how many); arguments go to pytest.
#
#   bash scripts/test.sh
#   bash scripts/test.sh tests/runtime -k sampling
set -euo pipefail

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare dev,cpu

cd "$ROOT"
"$PYTHON" -m ruff check .
exec "$PYTHON" -m pytest --numprocesses "${DSPARK_TEST_WORKERS:-2}" "$@"
