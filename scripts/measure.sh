#!/usr/bin/env bash
# Measure again, on two GPUs, what README.md and docs/report.md quote:
#   scripts/measure.sh kernels layers steps          these parts, one after the other, into docs/benchmarks
#   OUT=results scripts/measure.sh soak              into another folder
#   TEXT=books.jsonl scripts/measure.sh curves       loss curves need text: JSON lines with a field text
# Parts, each a few minutes: tests kernels counters memcheck stages layers combine copied steps steps_235b
# steps_kept steps_direct curves wgrad soak trace tokens routing rates many profile; on one GPU: single steps_1gpu
# steps_235b_1gpu. Afterwards:
# python -m titan_megamoe.bench report
# COMMIT names the commit, where git does not know it. A part that fails is named at the end, and the others run.
set -uo pipefail
jobs=train_configs/qwen3_30b_a3b

bench() { # subcommand, file, arguments
    local subcommand=$1 file=$2
    shift 2
    python -m titan_megamoe.bench "$subcommand" ${COMMIT:+--commit "$COMMIT"} --out "$out/$file" "$@"
}
text() {
    if [ -z "${TEXT:-}" ]; then
        echo "set TEXT to a file of JSON lines with a field text" >&2
        return 1
    fi
}

ALL=mega_moe,mega_moe@fp8,mega_moe@fp8/bf16,mega_moe@fp8_bwd,torchtitan+compile,deepep+compile:48,deep_gemm
OURS=mega_moe,mega_moe@fp8,torchtitan+compile,deepep+compile:48

tests() {
    timeout 240 python -m pytest -q -x -m gpu tests/hopper/test_fused_gpu.py tests/hopper/test_fp8_gpu.py &&
        timeout 200 python -m pytest -q -m gpu -k fused tests/test_gpu_faults.py tests/test_op.py
}
kernels() { timeout 400 python scripts/fp8_check.py --out "$out/gemm/fp8_kernels.json"; }
counters() { # what bounds the fp8 GEMMs; needs ncu and one GPU
    local pair
    for pair in fp8_wgrad:dW13 fp8_plain:dgrad1 fp8_up:gemm1; do
        timeout 120 ncu --clock-control none --section SpeedOfLight --section MemoryWorkloadAnalysis \
            --section MemoryWorkloadAnalysis_Tables --section SchedulerStats --section WarpStateStats \
            --kernel-name "${pair%:*}" --launch-skip 2 --launch-count 1 \
            python scripts/fp8_check.py --models 235b --call "${pair#*:}" || return 1
    done | tee "$out/logs/fp8_counters.txt"
}
memcheck() { # one rank, small shapes, all kernels of a layer; needs compute-sanitizer
    local precision
    for precision in bf16 fp8; do
        timeout 200 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
            python -m titan_megamoe.bench soak ${COMMIT:+--commit "$COMMIT"} --out "$out/logs/memcheck_$precision.json" \
            --ranks 1 --steps 6 --check-every 3 --repeats 2 --seed 2 --tokens 96 --hidden 256 --intermediate 384 \
            --precision $precision || return 1
    done | tee "$out/logs/memcheck.txt"
}
stages() {
    timeout 200 python scripts/fused_stages.py && timeout 200 python scripts/fused_stages.py --precision fp8
}
layers() {
    bench layer layer_30b.json --model qwen3-30b-a3b --impls "$ALL" &&
        bench layer layer_235b.json --model qwen3-235b-a22b --impls "$ALL"
}
combine() { # in CUDA, and in Triton
    local model
    for model in 30b-a3b 235b-a22b; do
        bench layer "layer_combine_${model%-*}.json" --model "qwen3-$model" \
            --impls mega_moe,mega_moe+combine_triton,mega_moe@fp8,mega_moe+combine_triton@fp8 || return 1
    done
}
copied() { # rows of an fp8 forward between two ranks: gathered by GEMM1, or dispatched inside of it
    local model
    for model in 30b-a3b 235b-a22b; do
        bench layer "logs/layer_copied_${model%-*}.json" --model "qwen3-$model" \
            --impls mega_moe@fp8,mega_moe+copied@fp8 || return 1
    done
}
steps() { bench compare step_30b_2gpu.json "$jobs/2gpu"; }
steps_235b() { bench compare step_235b_2gpu.json train_configs/qwen3_235b_a22b/2gpu; }
steps_kept() { # FSDP keeps what it gathered for the backward: memory for time, in all of them
    local job made=()
    for job in "$jobs"/2gpu/*.toml; do made+=("$job:parallelism.fsdp_reshard_after_forward=never"); done
    bench compare logs/step_30b_kept.json "${made[@]}"
}
steps_direct() { # expert weights as FSDP holds them, without its casts and copies
    local job made=("$jobs/2gpu/torchtitan.toml")
    for job in "$jobs"/2gpu/mega_moe_{fp8,bf16}.toml; do made+=("$job" "$job:mega_moe.direct_experts=true"); done
    bench compare logs/step_30b_direct.json "${made[@]}"
}
curves() {
    text && bench curves curves_30b_precisions.json --dataset "$TEXT" --steps 200 \
        "$jobs"/2gpu_curves/{torchtitan,mega_moe_bf16,mega_moe_fp8,mega_moe_fp8_bwd}.toml \
        "$jobs/2gpu_curves/mega_moe_fp8.toml:mega_moe.wgrad_precision=bf16" &&
        bench curves curves_30b_stock.json --dataset "$TEXT" --steps 50 \
            "$jobs"/2gpu/{torchtitan,torchtitan,mega_moe_bf16}.toml
}
wgrad() { # which weight gradients `fp8` should have, by time; `curves` says it by loss
    bench compare step_30b_wgrad.json "$jobs/2gpu/mega_moe_fp8.toml" \
        "$jobs/2gpu/mega_moe_fp8.toml:mega_moe.wgrad_precision=bf16"
}
soak() {
    bench soak soak_bf16.json --ranks 2 --steps 1000 && bench soak soak_fp8.json --ranks 2 --steps 1000 --precision fp8
}
profile() { # one step in fp8, kernel by kernel
    local work
    work=$(mktemp -d)
    bench compare logs/step_profiled.json --steps 16 --work "$work" \
        "$jobs/2gpu/mega_moe_fp8.toml:profiling.enable_profiling=true,profiling.profile_freq=14" &&
        python scripts/step_gaps.py "$work"/dump/profile_traces/iteration_*/rank0_trace.json \
            | tee "$out/logs/step_30b_fp8_profile.txt"
}
trace() { bench trace trace_30b.json --impls "$OURS"; }
tokens() {
    bench layer layer_tokens.json --impls "$OURS" --tokens 1024 --tokens 4096 --tokens 16384 --tokens 32768
}
routing() {
    bench layer layer_routing.json --impls "$OURS" --routing zipf --routing hot_expert --routing hot_rank
}
single() { # one rank; +inside: its fp8 forward as between ranks
    local model
    for model in 30b-a3b 235b-a22b; do
        bench layer "layer_${model%-*}_ep1.json" --model "qwen3-$model" --ep 1 \
            --impls mega_moe,mega_moe@fp8,mega_moe+inside@fp8,torchtitan+compile || return 1
    done
}
steps_1gpu() { bench compare step_30b_1gpu.json "$jobs/1gpu"; }
steps_235b_1gpu() { bench compare step_235b_1gpu.json train_configs/qwen3_235b_a22b/1gpu; }
rates() { bench calibrate calibration_h200.json; }
many() { # 4 and 8 ranks that share the GPUs
    TITAN_MEGAMOE_SHARED_GPUS=1 timeout 400 python -m pytest -q -m gpu tests/hopper/test_many_ranks.py &&
        bench soak soak_8_ranks.json --ranks 8 --share-gpus --tokens 128 --hidden 256 --intermediate 384 --steps 100 \
            --repeats 10
}

if [ $# -eq 0 ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
fi
failed=
for part in "$@"; do
    if [ "$(type -t "$part")" != function ] || [ "$part" = bench ] || [ "$part" = text ]; then
        echo "no part '$part'; scripts/measure.sh without arguments names them" >&2
        exit 2
    fi
done

root=$(cd "$(dirname "$0")/.." && pwd)
has_all='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torchtitan", "torchao", "torch"))))'
if ! python -c "$has_all" 2>/dev/null; then
    . "$root/scripts/env.sh"
fi
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" COLUMNS=${COLUMNS:-150}
out=${OUT:-docs/benchmarks}
mkdir -p "$out/gemm" "$out/logs"
for part in "$@"; do
    begin=$SECONDS
    echo "== $part"
    "$part" || failed+=" $part"
    echo "== $part: $((SECONDS - begin)) s"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2 && exit 1; }
