#!/usr/bin/env bash
# Decodes a prompt with the bundled model on two ranks of this machine's CPU; the text appears as it is decoded.
#
#   bash scripts/demo.sh                         the built-in prompt
#   bash scripts/demo.sh --prompt 'def main():'  options of "dspark generate"
set -euo pipefail

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare cpu

if [ $# -eq 0 ]; then
    set -- --prompt '<|user|>Give me three tips for cooking rice.<|assistant|>' --max-new-tokens 96
fi
say "+ torchrun --standalone --nproc-per-node 2 -m dspark.runtime generate $*"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m dspark.runtime generate "$@"
