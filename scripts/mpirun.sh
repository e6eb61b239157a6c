#!/usr/bin/env bash
# Starts a job with mpirun, whose own variables tell each rank what it is (dspark[mpi] agrees on address and port).
#
#   bash scripts/mpirun.sh --nodes 2 --procs 8 generate --pp 2 --input in.jsonl --output out.jsonl
#
# --nodes N  how many nodes (default 1); MPI_HOSTS=a,b names them    --interface IF  network interface that carries the job
# --procs N  ranks a node (default: its GPUs)                        --dry-run       print the plan; start nothing
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source-path=SCRIPTDIR source=cluster.sh
source "$ROOT/scripts/cluster.sh"
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

read_options "$@"
choose_python
count_procs
NODES="${NODES:-1}"
use_interface
ranks=("${MPIRUN:-mpirun}" -n "$((NODES * PROCS))" ${MPI_HOSTS:+-hosts "$MPI_HOSTS"} "$PYTHON" -m dspark.runtime "${COMMAND[@]}")
if [ -n "$DRY_RUN" ]; then
    show_plan "${ranks[@]}"
else
    supervise "${ranks[@]}"
fi
