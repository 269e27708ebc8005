#!/usr/bin/env bash
# Lint, types and tests; on machines without a GPU in two runs side by side, and with them those of the adapter for
# TorchTitan 0.3 in that line's virtual environment. Extra arguments go to pytest: scripts/test.sh -m gpu, and leave
# 0.3 out, which TITAN=0.3 scripts/test.sh tests/torchtitan_v03 runs alone.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$root"

on_03() (
    VENV=$VENV-0.3 TITAN=0.3
    . scripts/env.sh
    "$@"
)
in_the_background() {
    local status=0
    on_03 python -m pytest tests/torchtitan_v03 || status=$?
    python -m pytest tests/hopper || status=$?
    return "$status"
}

alone=
if [ $# -gt 0 ] || [ "$TITAN" != 0.2 ] || command -v nvidia-smi >/dev/null; then
    alone=1
else
    on_03 true & # makes its virtual environment meanwhile
fi
ruff check .
ruff format --check .
mypy
if [ "$alone" ]; then
    exec python -m pytest "$@"
fi
wait $!

log=$(mktemp)
trap 'rm -f "$log"' EXIT
in_the_background >"$log" 2>&1 &
other=$!
status=0
python -m pytest --ignore=tests/hopper || status=$?
wait "$other" || status=$?
cat "$log"
exit "$status"
