#!/usr/bin/env bash
# The machines of a hostfile under the deepspeed launcher: start this on each of them, with its own NODE_RANK.
#
#   NODE_RANK=0 MASTER_ADDR=node0 launchers/deepspeed.sh bert_base_mrpc
#   NODE_RANK=1 MASTER_ADDR=node0 launchers/deepspeed.sh bert_base_mrpc
#
# NODE_RANK is the line of the machine in HOSTFILE, from 0; PROCESSES is the number of ranks on each, if not all slots.
# With ssh from the first machine to all others, remove the two lines of --no_ssh and start it only there. deepspeed
# then passes on the variables of `.deepspeed_env` in the home folder: one NAME=value per line.
# One machine needs no hostfile: deepspeed --no_python trainer run bert_sample
set -euo pipefail

ARGUMENTS=("$@")
FOLDER=$PWD # where relative paths begin
VENV=${VENV:-}
HOSTS=() # instead of a hostfile
PROCESSES=${PROCESSES:-}
MASTER_ADDR=${MASTER_ADDR:?address of machine 0}
MASTER_PORT=${MASTER_PORT:-29500}

cd -- "$FOLDER"
if [[ -n $VENV ]]; then
    PATH=$VENV/bin:$PATH
fi
if ((${#HOSTS[@]})); then
    HOSTFILE=$(mktemp) # deepspeed reads the file twice
    printf "%s slots=$PROCESSES\n" "${HOSTS[@]}" >"$HOSTFILE"
fi
exec deepspeed \
    --hostfile "${HOSTFILE:-$(dirname "$0")/deepspeed_hostfile}" \
    --no_ssh --node_rank "${NODE_RANK:?line of this machine in the hostfile, from 0}" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
    ${PROCESSES:+--num_accelerators "$PROCESSES"} \
    --no_python trainer run "${ARGUMENTS[@]}"
