#!/usr/bin/env bash
# The whole layout matrix: every layout of up to 8 ranks, and one of 16, gives the tokens of one rank.
# Takes hours on a few cores; a line is printed for every layout as it ends.
# Usage: scripts/layout_matrix.sh [--model DIR]... [options of dspark bench layouts, such as --part 1/4]
set -euo pipefail
export OMP_NUM_THREADS=1
"${PYTHON:-python}" -P -m dspark.runtime bench layouts --ranks 8 "$@"
"${PYTHON:-python}" -P -m dspark.runtime bench layouts --only "tp16 dp2 cp4 ep16" "$@"
