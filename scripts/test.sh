#!/usr/bin/env bash
# Lint, types and tests; then those of the adapter for TorchTitan 0.3, in that line's virtual environment (on
# machines without a GPU, where they run anyway). Extra arguments go to pytest: scripts/test.sh -m gpu, and
# leave 0.3 out, which TITAN=0.3 scripts/test.sh tests/torchtitan_v03 runs alone.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$root"
ruff check .
ruff format --check .
mypy
python -m pytest "$@"
if [ $# -gt 0 ] || [ "$TITAN" != 0.2 ] || command -v nvidia-smi >/dev/null; then
    exit
fi
VENV=$VENV-0.3 TITAN=0.3
. scripts/env.sh
exec python -m pytest tests/torchtitan_v03
