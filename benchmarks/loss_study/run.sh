#!/usr/bin/env bash
# The runs of the loss study, and their report: `bash benchmarks/loss_study/run.sh [FOLDER]`. FOLDER is
# runs/loss_study by default. About 90 minutes on two cores; the same command again goes on.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
out=${1:-$root/runs/loss_study}

sweep() { # NAME OPTION...: a sweep in a folder of its own
    local name=$1
    shift
    "$root/.venv/bin/mqo" sweep --models llama32-1b,deepseek2_lite --datasets dolma \
        --training-config study -o "$out/$name" "$@"
}

# The ten modes, and the three that quantize all sites.
sweep modes --seeds 1 --modes 'bf16,FA_*,linear_*,mxfp8,mxfp4,hifp8'
# Chance, where it may decide.
sweep seeds --seeds 2,3 --modes 'bf16,linear_mxfp8,linear_mxfp4,mxfp8,mxfp4'
# dgrad and wgrad, too.
sweep gemms --gemms all --seeds 1,2,3 --modes 'linear_mxfp8,linear_mxfp4'
sweep gemms_hifp8 --gemms all --seeds 1 --modes linear_hifp8
# Without the LM head, which is a large part of so small a model.
sweep head --exclude output_layer --seeds 1,2,3 --modes 'linear_mxfp8,linear_mxfp4'
sweep head_hifp8 --exclude output_layer --seeds 1 --modes linear_hifp8

"$root/.venv/bin/mqo" report "$out" -o "$out/report"
