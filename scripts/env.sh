# Sourced by the other scripts: makes (once) and activates the virtual environment $VENV, default .venv.
#
# With an NVIDIA GPU: torch 2.11 with CUDA, deep_gemm and deep_ep in the versions that work together.
# Without: torch 2.13's CPU build. TORCH overrides the choice, for example TORCH="torch==2.13.0".
# PYTHON names the interpreter, 3.11 or newer.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$root/.venv}
PYTHON=${PYTHON:-python3}

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "found $("$PYTHON" --version 2>&1); titan_megamoe needs Python 3.11 or newer: set PYTHON" >&2
    exit 1
fi

stamp=$VENV/.titan_megamoe
wanted=$(cat "$root/pyproject.toml" "${BASH_SOURCE[0]}" | cksum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    echo "setting up $VENV (a few minutes the first time)"
    "$PYTHON" -m venv "$VENV"
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        torch=${TORCH:-torch==2.11.0} extra=gpu
    else
        torch=${TORCH:-torch==2.13.0} extra=cpu
    fi
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$torch"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e "${root}[torchtitan,dev,$extra]"
    echo "$wanted" >"$stamp"
fi
# shellcheck disable=SC1091
. "$VENV/bin/activate"
