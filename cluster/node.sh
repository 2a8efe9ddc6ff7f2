#!/usr/bin/env bash
# Start the training processes of one node and end with the exit code of the run: 0 complete, 75 stopped and saved.
#     OUT=runs/X cluster/node.sh configs/X.yaml [--flag value …]          --print before the run file shows the command only
# OUT must be on storage that outlives the node and that all nodes see. Which node this is, the scheduler's variables say
# (the table below). These win over them: NODES, NODE_RANK, MAIN_ADDRESS, MAIN_PORT, NPROC_PER_NODE; ACCELERATE is the
# accelerate file. Tests: tests/engine/distributed/test_cluster_files.py.
set -euo pipefail

log() { echo "node.sh: $*" >&2; }
fail() {
    log "error: $*"
    exit 2
}

print_only=
[[ ${1:-} != --print ]] || { print_only=1 && shift; }
[[ $# -gt 0 && $1 != -* ]] || fail "give a run file: OUT=runs/X cluster/node.sh configs/X.yaml [--flag value …]"
[[ -f train.py && -f $1 ]] || fail "there is no train.py or no $1 in $PWD: start it in the root of the project"
[[ -n ${OUT:-} ]] || fail "set OUT, the run folder, on storage that outlives this node"
[[ ! -d .venv/bin ]] || PATH=$PWD/.venv/bin:$PATH

first_node() { scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1; }
vertex() { # worker pool 0 has one node, pool 1 the others
    python -c "import json, os
spec = json.loads(os.environ['CLUSTER_SPEC'])
nodes = [node for pool in sorted(spec['cluster']) for node in spec['cluster'][pool]]
here = spec['cluster'][spec['task']['type']][spec['task']['index']]
print(len(nodes), nodes.index(here), *nodes[0].split(':'))"
}

# Scheduler, told by a variable: nodes, rank of this one, address and port of the first one, processes on each. The first row
# whose variable is set counts; an inner scheduler stands above the one that it may run in.
scheduler='' is=()
row() { [[ ! $scheduler && ${!2:-} ]] && scheduler=$1; }
row torchrun TORCHELASTIC_RUN_ID && is=("$WORLD_SIZE" "$RANK" "$MASTER_ADDR" "$MASTER_PORT" 1)
row Ray LOCAL_RANK && is=("$WORLD_SIZE" "$RANK" "$MASTER_ADDR" "$((MASTER_PORT + 1))" 1) # Ray has a process group at MASTER_PORT
row SkyPilot SKYPILOT_NODE_RANK && is=("$SKYPILOT_NUM_NODES" "$SKYPILOT_NODE_RANK" "${SKYPILOT_NODE_IPS%%$'\n'*}" '' "${SKYPILOT_NUM_GPUS_PER_NODE:-}")
row dstack DSTACK_NODE_RANK && is=("$DSTACK_NODES_NUM" "$DSTACK_NODE_RANK" "$DSTACK_MASTER_NODE_IP" '' "${DSTACK_GPUS_PER_NODE:-}")
row Kubeflow PET_NODE_RANK && is=("$PET_NNODES" "$PET_NODE_RANK" "${PET_MASTER_ADDR:-}" "${PET_MASTER_PORT:-}" "${PET_NPROC_PER_NODE:-}")
row SageMaker SM_CURRENT_HOST_RANK && is=("$SM_HOST_COUNT" "$SM_CURRENT_HOST_RANK" "$SM_MASTER_ADDR" "$SM_MASTER_PORT" "${SM_NUM_GPUS:-}")
row Vertex CLUSTER_SPEC && read -ra is <<<"$(vertex)"
row Kubernetes JOB_COMPLETION_INDEX && is=('' "$JOB_COMPLETION_INDEX" '' '' '') # an indexed Job: NODES, MAIN_ADDRESS are yours
row Slurm SLURM_NODEID && is=("$SLURM_NNODES" "$SLURM_NODEID" "$(first_node)" "$((20000 + SLURM_JOB_ID % 10000))" "${SLURM_GPUS_ON_NODE:-}")
[[ ! $scheduler || ${is[*]} ]] || fail "the variables of $scheduler cannot be read"

nodes=${NODES:-${is[0]:-1}} rank=${NODE_RANK:-${is[1]:-0}} address=${MAIN_ADDRESS:-${is[2]:-}} port=${MAIN_PORT:-${is[3]:-29500}}
((rank < nodes)) || fail "this is node $rank (from 0) of $nodes: set NODES"
[[ $scheduler != Slurm || ${SLURM_LOCALID:-0} == 0 ]] || fail "start it once on each node: srun --ntasks-per-node 1"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c ^GPU) || gpus=0
per_node=${NPROC_PER_NODE:-${is[4]:-}}
[[ $per_node =~ ^[1-9][0-9]*$ ]] || per_node=$((gpus > 0 ? gpus : 1)) # a scheduler may say 0 or auto
total=$((nodes * per_node))
if ((gpus > 0)); then file=gpu,ddp; else file=cpu,cpu_ddp; fi
if ((total > 1)); then file=${file#*,}; else file=${file%,*}; fi
machines=()
if ((nodes > 1)); then
    [[ $address ]] || fail "set MAIN_ADDRESS, the address of node 0, for $nodes nodes"
    machines=(--num_machines "$nodes" --machine_rank "$rank" --main_process_ip "$address" --main_process_port "$port")
fi
command=(accelerate launch --quiet --config_file "${ACCELERATE:-accelerate_configs/$file.yaml}" --num_processes "$total" "${machines[@]}")
case $scheduler in torchrun | Ray) command=(env MASTER_PORT="$port" python) ;; esac # each starts one process: no launcher
command+=(train.py --config "$1" --output_dir "$OUT" "${@:2}")
log "${scheduler:-no scheduler}: node $rank of 0 to $((nodes - 1)), $per_node processes on each, node 0 is ${address:-this machine}"
if [[ $print_only ]]; then
    echo "${command[@]}"
    exit
fi

# A scheduler that takes the node away sends TERM to this script, or to all processes of the node. The file makes all ranks
# save at the same step. The launcher ignores the signal: it would kill its processes half a minute later.
mkdir -p "$OUT"
rm -f "$OUT/status.json" # of the attempt before
# So is an empty `stop` that came too late for it: a run looks between two steps. One with a step is a user's.
if ((rank == 0)) && [[ ! -s $OUT/stop ]]; then rm -f "$OUT/stop"; fi
# shellcheck disable=SC2317  # called by the trap
stop() {
    local saved
    saved=$(find "$OUT/checkpoints" -mindepth 1 -maxdepth 1 -name 'step_*[0-9]' 2>/dev/null | sort | tail -n 1) || true
    log "asked the run to save and stop. If it is killed before it has, it resumes from ${saved:-its beginning}"
    touch "$OUT/stop"
}
trap stop TERM INT USR1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1        # otherwise ranks of a restart connect to addresses of the previous attempt
export PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT # of the launcher; its default includes TERM
(trap '' TERM USR1 && exec setsid "${command[@]}") &
launcher=$! code=0
while kill -0 "$launcher" 2>/dev/null; do
    code=0
    wait "$launcher" || code=$? # a trap ends `wait`, too
done
((code == 0)) || code=$(python -m engine.process.run_status "$OUT" "$code") # launchers know only 0 and 1
exit "$code"
