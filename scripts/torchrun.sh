#!/usr/bin/env bash
# Starts this node's ranks of a job on several nodes; run it on every node with the same options and its own --node-rank.
#
#   bash scripts/torchrun.sh --nodes 2 --procs 8 --node-rank 0 --head node0 generate --pp 2 --input in.jsonl --output out.jsonl
#
# --nodes N      how many nodes (default 1)          --port P        of the head, for the rendezvous (default 29500)
# --procs N      ranks a node (default: its GPUs)    --interface IF  network interface that carries the job
# --node-rank R  this node, from 0                   --logs DIR      where all ranks but rank 0 write (default logs)
# --head HOST    name or address of node 0           --dry-run       print layout, memory and command; start nothing
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source-path=SCRIPTDIR source=cluster.sh
source "$ROOT/scripts/cluster.sh"
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

read_options "$@"
choose_python
count_procs
NODES="${NODES:-1}" NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-0}}" PORT="${PORT:-29500}" LOGS="${LOGS:-logs}"
[ "$NODE_RANK" -lt "$NODES" ] || fail "--node-rank $NODE_RANK is not one of $NODES nodes"
[ "$NODES" -eq 1 ] || [ -n "$HEAD$INTERFACE" ] || fail "$NODES nodes need --head, the name or address of node 0"
[ "$NODE_RANK" -ne 0 ] || use_interface
if [ "$NODE_RANK" -ne 0 ] && [ -n "$INTERFACE" ]; then
    [ -n "$HEAD" ] || fail "node $NODE_RANK needs --head, the address of node 0 on $INTERFACE"
    export GLOO_SOCKET_IFNAME="$INTERFACE" NCCL_SOCKET_IFNAME="$INTERFACE"
fi

# Rank 0 speaks here; everybody else has a file.
redirects=()
for ((local_rank = 0; local_rank < PROCS; local_rank++)); do
    [ "$NODE_RANK$local_rank" = 00 ] || redirects+=("$local_rank:3")
done
redirects=(${redirects[@]+--redirects "$(IFS=, && printf '%s' "${redirects[*]}")"})
# Agents wait for each other as long as the ranks would, and not for those of another Slurm job at this port. What else
# their commands differ in is for the ranks to name.
limit=300
for ((word = 0; word < ${#COMMAND[@]}; word++)); do
    case "${COMMAND[word]}" in
    --timeout) limit="${COMMAND[word + 1]:-}" ;;
    --timeout=*) limit="${COMMAND[word]#*=}" ;;
    esac
done
limit="${limit%%.*}"
case "$limit" in "" | 0 | *[!0-9]*) limit=1 ;; esac
name="${SLURM_JOB_ID:-dspark}"
agent=("$PYTHON" -m dspark.parallel.agent --nnodes "$NODES" --nproc-per-node "$PROCS" --node-rank "$NODE_RANK"
    --master-addr "${HEAD:-127.0.0.1}" --master-port "$PORT" --rdzv-id "$name" --rdzv-conf "timeout=$limit"
    --max-restarts 0 --log-dir "$LOGS" ${redirects[@]+"${redirects[@]}"}
    -m dspark.runtime "${COMMAND[@]}")
if [ -n "$DRY_RUN" ]; then
    show_plan "${agent[@]}"
else
    mkdir -p "$LOGS"
    supervise "${agent[@]}"
fi
