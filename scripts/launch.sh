# Sourced by train.sh and train_multinode.sh, after env.sh: what to train on.
#
#   processes   ranks on this machine: $NPROC, or all GPUs, or 2 without one
#   data        TorchTitan's options for tokenizer and text. TOKENIZER and DATASET name folders (tokenizer.json;
#               JSON lines with a field text). DATA=job: what the job file says. Neither: a tiny built-in set,
#               made in $ASSETS.

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
# shellcheck disable=SC2034  # used where this file is sourced
processes=${NPROC:-$((gpus > 0 ? gpus : 2))}

if [ "${DATA:-}" = job ]; then
    data=()
else
    if [ -z "${TOKENIZER:-}${DATASET:-}" ]; then
        ASSETS=${ASSETS:-$root/outputs/assets}
        python -c 'import pathlib, sys; from titan_megamoe.quickstart import assets
assets.prepare(pathlib.Path(sys.argv[1]), 2048, say=print)' "$ASSETS"
        TOKENIZER=$ASSETS/tokenizer DATASET=$ASSETS/data
    fi
    : "${TOKENIZER:?set TOKENIZER beside DATASET: a folder with tokenizer.json}"
    : "${DATASET:?set DATASET beside TOKENIZER: a folder with JSON lines}"
    # shellcheck disable=SC2034
    data=("--model.hf_assets_path=$TOKENIZER" --training.dataset=c4_test "--training.dataset_path=$DATASET")
fi
