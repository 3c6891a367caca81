#!/usr/bin/env bash
# One machine under torchrun: one rank for each GPU, or PROCESSES ranks.
#
#   PROCESSES=2 launchers/torchrun_single_node.sh bert_sample training.epochs=1
#
# torchrun exits with 1 for every failure; `trainer run` alone exits with the run's code (75: stopped and saved).
# The rendezvous is static, because `--standalone` reads pickles from a port that every network can reach.
set -euo pipefail
free_port='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
MASTER_PORT=${MASTER_PORT:-$(python3 -c "$free_port")}
ranks=${PROCESSES:-gpu}
if [[ $ranks == gpu ]]; then
    ranks=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || true # without the program there is none
fi
if [[ $ranks =~ ^[1-9][0-9]*$ ]]; then # torchrun would set one thread
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > ranks ? $(nproc) / ranks : 1))}
fi
exec torchrun --nproc-per-node "${PROCESSES:-gpu}" --master-addr 127.0.0.1 --master-port "$MASTER_PORT" \
    --no-python trainer run "$@"
