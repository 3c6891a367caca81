#!/usr/bin/env bash
# Several machines under accelerate: start this on each of them, with its own NODE_RANK.
#
#   NODES=2 PROCESSES=8 NODE_RANK=0 MASTER_ADDR=node0 launchers/accelerate_multi_node.sh bert_base_mrpc
#   NODES=2 PROCESSES=8 NODE_RANK=1 MASTER_ADDR=node0 launchers/accelerate_multi_node.sh bert_base_mrpc
#
# accelerate_multi_node.yaml as options. The recipe sets precision and strategy. Works without a GPU too.
set -euo pipefail

ARGUMENTS=("$@")
FOLDER=$PWD # where relative paths begin
VENV=${VENV:-}
NODES=${NODES:?number of machines}
PROCESSES=${PROCESSES:?ranks on each machine}
MASTER_ADDR=${MASTER_ADDR:?address of machine 0}
MASTER_PORT=${MASTER_PORT:-29500}

cd -- "$FOLDER"
if [[ -n $VENV ]]; then
    PATH=$VENV/bin:$PATH
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > PROCESSES ? $(nproc) / PROCESSES : 1))}
exec accelerate launch --multi_gpu --mixed_precision no --dynamo_backend no \
    --num_machines "$NODES" --num_processes "$((NODES * PROCESSES))" \
    --machine_rank "${NODE_RANK:?number of this machine, from 0}" \
    --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" --rdzv_backend static \
    --no_python trainer run "${ARGUMENTS[@]}"
