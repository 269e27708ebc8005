#!/usr/bin/env bash
# Train one job on this machine:
#   scripts/train.sh train_configs/qwen3_30b_a3b/2gpu/mega_moe_bf16.toml [TorchTitan's options]
# NPROC, TOKENIZER, DATASET, DATA, ASSETS: see launch.sh.
set -euo pipefail
job=${1:?usage: scripts/train.sh JOB.toml [options]}
shift
. "$(dirname "$0")/env.sh"
. "$(dirname "$0")/launch.sh"
exec torchrun --standalone --nproc-per-node "$processes" --role rank --tee 3 --local-ranks-filter 0 \
    -m titan_megamoe.torchtitan "$job" "${data[@]}" "$@"
