#!/usr/bin/env bash
# The whole layout matrix: every layout of up to 8 ranks, and one of 16, gives the token ids of one rank.
# Takes hours on a few cores; a line is printed for every layout as it ends. Fails if any layout gave other ids.
#
#   bash scripts/layout_matrix.sh                           the bundled model, and 16 ranks dp2 x cp4 x attn_tp2 with ep16
#   bash scripts/layout_matrix.sh --model DIR --part 1/4    options of "dspark bench layouts"
set -euo pipefail

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare cpu

export OMP_NUM_THREADS=1
status=0
"$PYTHON" -m dspark.runtime bench layouts --ranks 8 "$@" || status=$?
if [ $# -eq 0 ]; then
    "$PYTHON" -m dspark.runtime bench layouts --only "tp16 dp2 cp4 ep16" || status=$?
fi
exit "$status"
