#!/usr/bin/env bash
# Overlap measured between two network namespaces with slowed links: a table, a trace and a picture.
# Needs root (or it skips, and says so). Usage: scripts/overlap.sh [FOLDER] [options of dspark bench overlap]
set -euo pipefail
export OMP_NUM_THREADS=1
folder=${1:-.}
[ $# -gt 0 ] && shift
if [ "$(id -u)" != 0 ]; then
  echo "SKIPPED: network namespaces need root; run this as root" >&2
  exit 0
fi
"${PYTHON:-python}" -P -m dspark.runtime bench overlap --nodes 2 --rate auto --tokens 16,512 \
  --trace "$folder/overlap.json" --picture "$folder/overlap.png" "$@"
