# Sourced by the launchers: their options, how a job is ended, and which Python runs it. Expects $ROOT, the checkout.
# shellcheck shell=bash disable=SC2034

export PYTHONSAFEPATH=1 PYTHONFAULTHANDLER=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

NODES="" PROCS="" NODE_RANK="" HEAD="" PORT="" INTERFACE="" LOGS="" DRY_RUN=""
COMMAND=()

fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

# Options of the launcher come first, then the verb with its own; they end up in the variables above.
read_options() {
    while [ $# -gt 0 ]; do
        case "$1" in
        --dry-run) DRY_RUN=yes && shift && continue ;;
        --help) usage && exit 0 ;;
        --*) [ $# -ge 2 ] || fail "$1 needs a value" ;;
        *) break ;;
        esac
        case "$1" in
        --nodes) NODES="$2" ;;
        --procs) PROCS="$2" ;;
        --node-rank) NODE_RANK="$2" ;;
        --head) HEAD="$2" ;;
        --port) PORT="$2" ;;
        --interface) INTERFACE="$2" ;;
        --logs) LOGS="$2" ;;
        *) fail "unknown option $1 (see --help); options of dspark come after its verb" ;;
        esac
        shift 2
    done
    [ $# -gt 0 ] || fail "what shall run? give a verb such as generate (see --help)"
    COMMAND=("$@")
    local name
    for name in NODES PROCS NODE_RANK PORT; do
        case "${!name}" in *[!0-9]*) fail "${!name} is no number" ;; esac
    done
}

# The Python of $DSPARK_PYTHON, of the checkout's own environment, or of the shell's.
choose_python() {
    PYTHON="${DSPARK_PYTHON:-$ROOT/.venv/bin/python}"
    [ -n "${DSPARK_PYTHON:-}" ] || [ -x "$PYTHON" ] || PYTHON="$(command -v python3)"
    "$PYTHON" -c 'import dspark.runtime' || fail "$PYTHON has no dspark; install it there or set DSPARK_PYTHON"
}

# GPUs of this node, else one process.
count_procs() {
    local gpus="${SLURM_GPUS_ON_NODE:-}"
    [ -n "$gpus" ] || gpus="$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)"
    PROCS="${PROCS:-$((gpus > 0 ? gpus : 1))}"
}

# The fabric: which interface carries the job, and the head's address on it. Run on the head.
use_interface() {
    [ -n "$INTERFACE" ] || return 0
    export GLOO_SOCKET_IFNAME="$INTERFACE" NCCL_SOCKET_IFNAME="$INTERFACE"
    [ -n "$HEAD" ] && return 0
    HEAD="$(ip -4 -o addr show dev "$INTERFACE" | awk 'NR == 1 { sub("/.*", "", $4); print $4 }')"
    [ -n "$HEAD" ] || fail "the interface $INTERFACE has no IPv4 address here"
}

# Two jobs that share a host rarely share a port.
port_of_job() { printf '%s\n' $((15000 + $1 % 15000)); }

# Prints what would run, and what it would be on these nodes; $@ is the command.
show_plan() {
    printf 'would run, on each of %s nodes:' "$NODES"
    printf ' %q' "$@"
    printf '\n\n'
    "$PYTHON" -m dspark.runtime dry-run --world "$((NODES * PROCS))" --gpus-per-node "$PROCS" -- "${COMMAND[@]}"
}

# Whether the head cannot be reached. One that refuses has ended by itself.
head_is_cut_off() {
    local answer status=0
    [ -n "$HEAD" ] || return 1
    answer="$(timeout 2 bash -c ": <>/dev/tcp/$HEAD/$PORT" 2>&1)" || status=$?
    [ "$status" -ne 0 ] && [ "${answer%refused*}" = "$answer" ]
}

# Passes the signal $1 on to the process $2, or in a batch job to its tasks: srun would answer SIGTERM by killing them.
forward() {
    if [ -n "${SLURM_JOB_ID:-}" ] && [ "$3" = srun ]; then
        scancel --signal="$1" "$SLURM_JOB_ID"
    else
        kill -"$1" "$2" 2>/dev/null
    fi
}

# An agent whose ranks have all ended would wait long for a head that is gone, so it is ended; $1 is its process.
end_idle_agent() {
    local idle=0 had_ranks="" nothing
    exec {nothing}<> <(:)  # never has anything to read; unlike a sleep, waiting for it leaves no process behind
    while ! read -rt 1 -u "$nothing" && kill -0 "$1"; do
        if pgrep -P "$1" >/dev/null; then
            had_ranks=yes idle=0
        elif [ -n "$had_ranks" ]; then
            idle=$((idle + 1))
            if [ "$idle" -ge 60 ] || { [ "$idle" -ge 2 ] && head_is_cut_off; }; then
                kill -KILL "$1" || true
            fi
        fi
    done
}

# Runs $@ in the background until it ends, passing SIGTERM and SIGINT on to it; returns its status.
supervise() {
    local pid watch status=0
    "$@" &
    pid=$!
    end_idle_agent "$pid" >/dev/null 2>&1 &
    watch=$!
    # shellcheck disable=SC2064 # what is known now
    trap "forward TERM $pid $1 || true" TERM
    # shellcheck disable=SC2064
    trap "forward INT $pid $1 || true; interrupted=yes" INT
    while kill -0 "$pid" 2>/dev/null; do
        wait "$pid" || true  # a signal ends the wait, but not what is waited for
    done
    wait "$pid" || status=$?
    kill "$watch" 2>/dev/null || true
    [ -z "${interrupted:-}" ] || status=130
    return "$status"
}
