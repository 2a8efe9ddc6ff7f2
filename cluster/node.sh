#!/usr/bin/env bash
# Start the training processes of one node and end with the exit code of the run: 0 complete, 75 stopped and saved.
#     OUT=runs/X NODES=2 NODE_RANK=0 MAIN_ADDRESS=10.0.0.1 cluster/node.sh configs/X.yaml [--flag value …]
# OUT must be on storage that outlives the node and that all nodes see. Further variables, each with a default: NODES, NODE_RANK,
# MAIN_ADDRESS, MAIN_PORT, NPROC_PER_NODE, ACCELERATE (accelerate file). Tests: tests/engine/distributed/test_cluster_files.py.
set -euo pipefail

fail() {
    echo "node.sh: error: $*" >&2
    exit 2
}

[[ $# -gt 0 && $1 != -* ]] || fail "give a run file: OUT=runs/X cluster/node.sh configs/X.yaml [--flag value …]"
[[ -f train.py && -f $1 ]] || fail "there is no train.py or no $1 in $PWD: start it in the root of the project"
[[ -n ${OUT:-} ]] || fail "set OUT, the run folder, on storage that outlives this node"
[[ ! -d .venv/bin ]] || PATH=$PWD/.venv/bin:$PATH
gpus=$(nvidia-smi -L 2>/dev/null | grep -c ^GPU) || gpus=0
per_node=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}
nodes=${NODES:-1} rank=${NODE_RANK:-0} total=$((${NODES:-1} * per_node))
if ((gpus > 0)); then file=gpu,ddp; else file=cpu,cpu_ddp; fi
if ((total > 1)); then file=${file#*,}; else file=${file%,*}; fi
machines=()
if ((nodes > 1)); then
    [[ -n ${MAIN_ADDRESS:-} ]] || fail "set MAIN_ADDRESS, the address of node 0, for $nodes nodes"
    machines=(--num_machines "$nodes" --machine_rank "$rank" --main_process_ip "$MAIN_ADDRESS" --main_process_port "${MAIN_PORT:-29500}")
fi

# A scheduler that takes the node away sends TERM to this script only. The file makes all ranks save at the same step; a
# launcher that got the signal itself would kill its processes half a minute later.
mkdir -p "$OUT"
rm -f "$OUT/status.json" # of the attempt before
# So is an empty `stop` that came too late for it: a run looks between two steps. One with a step is a user's.
if ((rank == 0)) && [[ ! -s $OUT/stop ]]; then rm -f "$OUT/stop"; fi
trap 'touch "$OUT/stop"' TERM INT USR1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # otherwise ranks of a restart connect to addresses of the previous attempt
setsid accelerate launch --quiet --config_file "${ACCELERATE:-accelerate_configs/$file.yaml}" --num_processes "$total" \
    "${machines[@]}" train.py --config "$1" --output_dir "$OUT" "${@:2}" &
launcher=$! code=0
while kill -0 "$launcher" 2>/dev/null; do
    code=0
    wait "$launcher" || code=$? # a trap ends `wait`, too
done
((code == 0)) || code=$(python -m engine.process.run_status "$OUT" "$code") # launchers know only 0 and 1
exit "$code"
