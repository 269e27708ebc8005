# Sourced by the other scripts: makes (once) and activates the virtual environment $VENV, default .venv.
#
# With an NVIDIA GPU: torch 2.11 with CUDA, deep_gemm and deep_ep in the versions that work together.
# Without: torch 2.13's CPU build, where the index has one; else, for 0.2, pip falls back to torch 2.11, which brings
# the Triton that the kernels are written for. TORCH overrides the choice, for example TORCH="torch==2.13.0".
# PYTHON names the interpreter, 3.11 or newer.
# TITAN names the line of TorchTitan, 0.2 (the default) or 0.3: each has a virtual environment of its own, since
# their pins exclude one another. 0.3 needs torch 2.13, for which there are no deep_gemm and deep_ep builds.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TITAN=${TITAN:-0.2}
case $TITAN in
0.2) titan=torchtitan suffix="" other=-0.3 ;;
0.3) titan=torchtitan03 suffix=-0.3 other="" ;;
*)
    echo "TITAN is $TITAN; it must be 0.2 or 0.3, the lines of TorchTitan that titan_megamoe has adapters for" >&2
    exit 1
    ;;
esac
VENV=${VENV:-$root/.venv$suffix}
PYTHON=${PYTHON:-python3}

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "found $("$PYTHON" --version 2>&1); titan_megamoe needs Python 3.11 or newer: set PYTHON" >&2
    exit 1
fi

if [ -f "$VENV/.titan_megamoe$other" ]; then
    echo "$VENV holds the other line of TorchTitan, not $TITAN: set VENV to another folder, or unset it" >&2
    exit 1
fi
stamp=$VENV/.titan_megamoe$suffix
wanted=$(cat "$root/pyproject.toml" "${BASH_SOURCE[0]}" | cksum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    echo "setting up $VENV (a few minutes the first time)"
    "$PYTHON" -m venv "$VENV"
    if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
        torch=${TORCH:-torch==2.13.0} extra=cpu
    elif [ "$TITAN" = 0.2 ]; then
        torch=${TORCH:-torch==2.11.0} extra=gpu
    else
        torch=${TORCH:-torch==2.13.0} extra=dev
    fi
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$torch"
    brought='from importlib.metadata import version; version("triton")'
    if [ "$extra" = cpu ] && [ "$TITAN" = 0.3 ] && "$VENV/bin/python" -c "$brought" 2>/dev/null; then
        extra=dev # a CUDA build of torch, which has a Triton of its own
    fi
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e "${root}[$titan,dev,$extra]"
    echo "$wanted" >"$stamp"
fi
# shellcheck disable=SC1091
. "$VENV/bin/activate"
