#!/usr/bin/env bash
# Lint, types and tests; beside them, on machines without a GPU, those of the adapter for TorchTitan 0.3 in that
# line's virtual environment. Extra arguments go to pytest: scripts/test.sh -m gpu, and leave 0.3 out, which
# TITAN=0.3 scripts/test.sh tests/torchtitan_v03 runs alone.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$root"
ruff check .
ruff format --check .
mypy
if [ $# -gt 0 ] || [ "$TITAN" != 0.2 ] || command -v nvidia-smi >/dev/null; then
    exec python -m pytest "$@"
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
on_03() (
    VENV=$VENV-0.3 TITAN=0.3
    . scripts/env.sh
    "$@"
)
on_03 true # its virtual environment, before two runs share the machine
on_03 python -m pytest tests/torchtitan_v03 >"$log" 2>&1 &
other=$!
status=0
python -m pytest || status=$?
wait "$other" || status=$?
cat "$log"
exit "$status"
