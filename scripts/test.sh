#!/usr/bin/env bash
# Lint, types and tests. Extra arguments go to pytest: scripts/test.sh -m gpu
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$root"
ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
