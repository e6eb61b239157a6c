#!/usr/bin/env bash
# What needs 2 to 8 GPUs of one machine: layouts with NCCL give the tokens of one GPU, with every dispatcher, and with
# DeepEP's where that is installed. Ends with 1 if tokens differ.
#
#   bash scripts/gpu_multi_check.sh [GPUS]       GPUS: default all, at most 8
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
PYTHON="${DSPARK_PYTHON:-.venv/bin/python}"
export PYTHONSAFEPATH=1 PYTHONPATH="" OMP_NUM_THREADS=4
unset TRITON_INTERPRET
GPUS="${1:-$("$PYTHON" -c 'import torch; print(min(torch.cuda.device_count(), 8))' 2>/dev/null || echo 0)}"
if [ "$GPUS" -lt 2 ]; then
    echo "error: $PYTHON sees $GPUS GPUs; at least 2 are needed" >&2
    exit 2
fi
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
FAILED=0
COMPARE='import json, sys
ids = [[json.loads(line)["token_ids"] for line in open(path)] for path in sys.argv[1:]]
sys.exit(ids[0] != ids[1] or not ids[0])'

# run NAME RANKS OPTIONS...: decodes two prompts on RANKS GPUs and compares with the one-GPU tokens.
run() {
    local name="$1" ranks="$2"
    shift 2
    if ! timeout 180 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m dspark.runtime generate \
        --device cuda --dtype float32 --max-new-tokens 48 --ignore-eos --output "$WORK/$name.jsonl" \
        --prompt '<|user|>Give me three tips for cooking rice.<|assistant|>' --prompt 'def main():' "$@" \
        >"$WORK/$name.log" 2>&1; then
        printf '%-24s FAILED\n' "$name"
        tail -n 5 "$WORK/$name.log"
        FAILED=1
    elif [ "$name" != one ] && ! "$PYTHON" -c "$COMPARE" "$WORK/one.jsonl" "$WORK/$name.jsonl"; then
        printf '%-24s TOKENS DIFFER\n' "$name"
        FAILED=1
    else
        printf '%-24s ok\n' "$name"
    fi
}

run one 1 --draft none
run tp "$GPUS" --tp "$GPUS" --draft none
run tp-no-graphs "$GPUS" --tp "$GPUS" --draft none --no-graphs
run tp-dspark "$GPUS" --tp "$GPUS" --draft dspark
run dp "$GPUS" --tp "$GPUS" --dp "$GPUS" --draft none
run pp 2 --pp 2 --draft none
run cp "$GPUS" --tp "$GPUS" --cp "$GPUS" --draft none
run ep-standard "$GPUS" --tp "$GPUS" --ep "$GPUS" --draft none
run ep-normal "$GPUS" --tp "$GPUS" --dp "$GPUS" --ep "$GPUS" --dispatcher normal --draft none
run ep-low-latency "$GPUS" --tp "$GPUS" --dp "$GPUS" --ep "$GPUS" --dispatcher low_latency --draft none
if "$PYTHON" -c 'import deep_ep' 2>/dev/null; then
    run deep-ep-normal "$GPUS" --tp "$GPUS" --dp "$GPUS" --ep "$GPUS" --dispatcher normal --dispatch-backend deep_ep
    run deep-ep-low-latency "$GPUS" --tp "$GPUS" --dp "$GPUS" --ep "$GPUS" --dispatcher low_latency \
        --dispatch-backend deep_ep
else
    echo "deep_ep is not installed: its two dispatchers are left out"
fi
exit "$FAILED"
