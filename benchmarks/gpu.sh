#!/usr/bin/env bash
# What one GPU can say in ten minutes: that it works, what a step costs, and what SmolLM2 learns.
#
#     benchmarks/gpu.sh OUT           # on a GPU
#     TINY=1 benchmarks/gpu.sh OUT    # all of it in small, on a CPU, in a minute or two
#
# Each part writes a file in OUT when it is done, and the comparisons one after every few seeds, so that little is lost
# if the time is over. The same command then goes on from the runs in outputs/bench. Without a network, bring along
# outputs/policies/words and outputs/policies/mixed. PYTHON names the interpreter.

set -uo pipefail
out=$(realpath -m "${1:?Name the directory of the results: benchmarks/gpu.sh OUT}")
cd "$(dirname "$0")/.."
mkdir -p "$out"
python=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

if [ -z "${TINY:-}" ]; then
    work=outputs shape=qwen2.5-0.5b workers=9 stages=("0 1 2" "0 1 2 3 4 5" "0 1 2 3 4 5 6 7")
    check=(--time_limit 100) source=() compare=()
    rows=(--num_prompts 8 --min_completion_length 1024 --max_completion_length 1024)
    train=(--max_completion_length 1024 --max_steps 5)
else
    work=$(mktemp -d) shape=tiny workers=1 stages=("0")
    trap 'rm -rf "$work"' EXIT
    check=(--time_limit 5) source=(--model_name_or_path "$work/$shape" --num_examples 4)
    rows=(--num_prompts 2 --min_completion_length 8 --max_completion_length 8)
    train=(--max_completion_length 8 --max_steps 2 --use_cpu true --bf16 false)
    compare=(--generated_tokens 1 --num_evals 1 --num_heldout 2)
fi

part() { # FILE SECONDS COMMAND...: adds what a command prints to OUT/FILE
    local file=$1 seconds=$2 began=$SECONDS
    shift 2
    timeout "$seconds" "$@" >>"$out/$file" 2>&1
    echo "$file: exit code $?, after $((SECONDS - began)) s, $SECONDS s in all"
}

policies() { # while nothing is timed
    for family in words mixed; do
        part policies.txt 200 "$python" -m benchmarks make-policy --task $family \
            --output_dir "$work/policies/$family" "${source[@]}"
    done
}

learn() { # FAMILY RECIPE
    local runs=$work/bench/gpu_$1 seeds
    for seeds in "${stages[@]}"; do
        part "$1.txt" 600 "$python" -m benchmarks compare --config "recipes/bench/$2.yaml" --num_workers $workers \
            --model_name_or_path "$work/policies/$1" --dataset_name "$work/policies/$1/data" --output_dir "$runs" \
            --seeds $seeds "${compare[@]}"
        [ -f "$runs/report.md" ] || return
        cp "$runs/kept.jsonl.gz" "$out/$1.jsonl.gz"
        cat "$runs/report.md" >>"$out/$1.txt"
    done
}

"$python" -m benchmarks.language.untrained "$work/$shape" $shape >/dev/null
policies &
part check.txt 120 "$python" -m fr3e_trl.commands.cli check --output "$work/check.md" "${check[@]}"
wait

step=(--model_name_or_path "$work/$shape" --dataset_name "$work/policies/words/data"
    --reward_funcs benchmarks.language.untrained.coin --num_generations 8 --dtype bfloat16)
part step.txt 240 "$python" -m benchmarks cost step "${step[@]}" "${rows[@]}" --trainers FR3E GRPO --num_steps 1 \
    --num_turns 1
if "$python" -c "import vllm" 2>/dev/null; then
    for anchors in "" "--num_anchors 0"; do # FR3E, and GRPO
        part vllm.txt 120 "$python" -m fr3e_trl.commands.cli train "${step[@]}" "${train[@]}" $anchors \
            --output_dir "$work/vllm" --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 \
            --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --logging_steps 1 --save_strategy no
    done
else
    echo "vllm.txt: not run, as vllm is not installed"
fi

# Runs share the GPU by NVIDIA's multi-process service, where there is one
command -v nvidia-cuda-mps-control >/dev/null && nvidia-cuda-mps-control -d
learn words compare_words_gpu &
learn mixed compare_mixed &
wait
command -v nvidia-cuda-mps-control >/dev/null && echo quit | nvidia-cuda-mps-control
exit 0
