#!/usr/bin/env bash
# Everything that needs one GPU, within 8 minutes and without a network: kernels against their plain twins, the oracles,
# golden continuations, DSpark on and off, graphs on and off, kernel times against the floor, and tokens per second of a
# synthetic model. The report is also in gpu-check.txt (or the file that DSPARK_REPORT names). Ends with 1 if a part fails.
#
#   bash scripts/gpu_check.sh                    uses .venv, or the Python that DSPARK_PYTHON names
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
PYTHON="${DSPARK_PYTHON:-.venv/bin/python}"
REPORT="${DSPARK_REPORT:-gpu-check.txt}"
export PYTHONSAFEPATH=1 PYTHONPATH="" OMP_NUM_THREADS=4
unset TRITON_INTERPRET
FAILED=()
COMPARE='import json, sys
ids = [[json.loads(line)["token_ids"] for line in open(path)] for path in sys.argv[1:]]
sys.exit(ids[0] != ids[1] or not ids[0])'
: >"$REPORT"

say() { printf '%s\n' "$*" | tee -a "$REPORT"; }

# part NAME SECONDS COMMAND...: runs a part with a time limit.
part() {
    local name="$1" limit="$2" start=$SECONDS
    shift 2
    say "== $name"
    if timeout "$limit" "$@" 2>&1 | tee -a "$REPORT"; then
        say "-- $name: passed in $((SECONDS - start)) s"
    else
        say "-- $name: FAILED after $((SECONDS - start)) s"
        FAILED+=("$name")
    fi
}

# same NAME A B: two result files must hold the same token ids.
same() {
    if "$PYTHON" -c "$COMPARE" "$2" "$3"; then
        say "-- $1: same tokens"
    else
        say "-- $1: TOKENS DIFFER"
        FAILED+=("$1")
    fi
}

generate() {
    local output="$1"
    shift
    "$PYTHON" -m dspark.runtime generate --device cuda --dtype float32 --kernels triton --max-new-tokens 64 --ignore-eos \
        --prompt '<|user|>Give me three tips for cooking rice.<|assistant|>' --prompt 'def main():' --output "$output" "$@"
}

if ! "$PYTHON" -c 'import sys, torch, triton; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    say "error: $PYTHON needs torch with CUDA, triton and a GPU; name another one: DSPARK_PYTHON=/path/to/python"
    exit 2
fi
say "$("$PYTHON" -c 'import torch, triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)')"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT

part "twins against kernels" 150 "$PYTHON" -m pytest -q -p no:cacheprovider tests/layers/test_triton_rows.py \
    tests/layers/test_triton_attention.py tests/layers/test_packed_keys.py tests/layers/test_triton_sampling.py \
    tests/layers/test_triton_blocks.py \
    tests/layers/test_quantised.py
part "oracle" 60 "$PYTHON" -m pytest -q -p no:cacheprovider tests/runtime/test_triton_oracle.py
part "plain kernels, no draft" 60 generate "$WORK/plain.jsonl" --kernels torch --draft none
part "Triton, no draft, no graphs" 60 generate "$WORK/eager.jsonl" --draft none --no-graphs
part "Triton, no draft, graphs" 60 generate "$WORK/graphs.jsonl" --draft none
part "Triton, DSpark, graphs" 60 generate "$WORK/dspark.jsonl" --draft dspark
same "golden continuations: Triton as plain torch" "$WORK/plain.jsonl" "$WORK/eager.jsonl"
same "graphs on and off" "$WORK/eager.jsonl" "$WORK/graphs.jsonl"
same "DSpark on and off" "$WORK/graphs.jsonl" "$WORK/dspark.jsonl"
part "Triton, DSpark, keys in FP8" 60 generate "$WORK/keys.jsonl" --draft dspark --kv-format fp8
part "plain kernels, keys in FP8" 60 generate "$WORK/keys-plain.jsonl" --kernels torch --draft none --kv-format fp8
same "keys in FP8: Triton with DSpark as plain torch" "$WORK/keys-plain.jsonl" "$WORK/keys.jsonl"
part "kernel times" 90 "$PYTHON" -m dspark.runtime bench kernels --rows 8,64
part "synthetic model" 120 "$PYTHON" -m dspark.runtime bench synthetic

say "total: $SECONDS s"
if [ ${#FAILED[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${FAILED[@]}" | tee -a "$REPORT"
    exit 1
fi
say "all parts passed"
