#!/usr/bin/env bash
# The main job: train a small Qwen3-MoE through TorchTitan with the mega_moe converter, beside stock.
set -euo pipefail
. "$(dirname "$0")/env.sh"
exec python -m titan_megamoe.quickstart "$@"
