#!/usr/bin/env bash
# Train one job on several machines: start this on each, with the same arguments.
#   NNODES=4 HEAD=node0:29500 scripts/train_multinode.sh JOB.toml [TorchTitan's options]
# HEAD is any one of the machines and a free port there. RUN_ID tells concurrent runs apart.
# NPROC, TOKENIZER, DATASET, DATA, ASSETS: see launch.sh.
set -euo pipefail
job=${1:?usage: NNODES=n HEAD=host:port scripts/train_multinode.sh JOB.toml [options]}
shift
: "${NNODES:?set NNODES, the number of machines}"
: "${HEAD:?set HEAD, host:port on one of the machines}"
. "$(dirname "$0")/env.sh"
. "$(dirname "$0")/launch.sh"
exec torchrun --nnodes "$NNODES" --nproc-per-node "$processes" --role rank --tee 3 --local-ranks-filter 0 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${RUN_ID:-titan_megamoe}" \
    -m titan_megamoe.torchtitan "$job" "${data[@]}" "$@"
