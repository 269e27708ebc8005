#!/usr/bin/env bash
# Train a list of jobs one after another on this machine and table their step times:
#   scripts/compare.sh train_configs/qwen3_30b_a3b/2gpu --out docs/benchmarks/step_30b.json
# Arguments: scripts/compare.sh --help
set -euo pipefail
. "$(dirname "$0")/env.sh"
exec python -m titan_megamoe.bench compare "$@"
