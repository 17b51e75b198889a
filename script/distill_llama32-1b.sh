#!/usr/bin/env bash
# Distills llama31-8b into llama32-1b, on wikipedia: the student learns from its teacher's logits and
# from the text.
#
# usage: distill_llama32-1b.sh --training-config tiny|study|smoke [OPTION...] [-- MEGATRON_FLAG...]
#        distill_llama32-1b.sh CHECKPOINT TENSORBOARD TOKENIZER DATA_PREFIX [DTYPE] \
#            --teacher RUN_OR_CHECKPOINTS [OPTION...] [-- MEGATRON_FLAG...]
#   --teacher    a run that saved, or a folder of checkpoints. Without it a teacher of the same
#                training configuration is trained first, and kept in runs/ for the next time.
#   --quantization MODE, --distillation-config FILE    of the student; bf16 and the file beside this
# More options: docs/distillation.md, script/README.md, or --help.
set -euo pipefail
here=$(realpath -- "${BASH_SOURCE[0]}")
here=${here%/*}
train=(python3 "$here/train_config.py" --dataset wikipedia --quantization bf16)

config=standard given='' previous='' dry=''
for word in "$@"; do
    [[ $word == -- ]] && break
    case $previous in --training-config) config=$word ;; esac
    case $word in
        --training-config=*) config=${word#*=} ;;
        --teacher | --teacher=* | --help | -h | --list) given=yes ;;
        --dry-run) dry=yes ;;
    esac
    previous=$word
done

teacher=()
if [[ -z $given ]]; then
    folder=${here%/*}/runs/teacher_llama31-8b_$config
    teacher=(--teacher "$folder")
    # The mark of a teacher that was trained to its end: an interrupted one is gone on with.
    if [[ ! -e $folder/trained ]]; then
        "${train[@]}" --model llama31-8b --training-config "$config" "$folder" ${dry:+--dry-run}
        [[ -n $dry ]] || touch "$folder/trained"
    fi
fi
student=("${train[@]}" --model llama32-1b --distillation-config "$here/distill_llama32-1b.yaml")
if [[ -n $dry && -z $given && ! -e $folder/trained ]]; then
    # Refused only for the teacher that the first command would make.
    "${student[@]}" "${teacher[@]}" "$@" || echo "# the command above follows the teacher's training"
    exit
fi
exec "${student[@]}" "${teacher[@]}" "$@"
