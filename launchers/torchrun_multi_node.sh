#!/usr/bin/env bash
# Several machines under torchrun: start this on each of them, with its own NODE_RANK.
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=node0 launchers/torchrun_multi_node.sh bert_base_mrpc
#   NODES=2 NODE_RANK=1 MASTER_ADDR=node0 launchers/torchrun_multi_node.sh bert_base_mrpc
#
# MASTER_ADDR is the machine of NODE_RANK 0; MASTER_PORT must be free there and open to the others. Checkpoints go to
# `checkpoint.folder`, which all machines must share.
set -euo pipefail
exec torchrun \
    --nnodes "${NODES:?number of machines}" \
    --node-rank "${NODE_RANK:?number of this machine, from 0}" \
    --master-addr "${MASTER_ADDR:?address of machine 0}" \
    --master-port "${MASTER_PORT:-29500}" \
    --nproc-per-node "${PROCESSES:-gpu}" \
    -m trainer run "$@"
