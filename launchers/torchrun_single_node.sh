#!/usr/bin/env bash
# One machine under torchrun: one rank for each GPU, or PROCESSES ranks.
#
#   PROCESSES=2 launchers/torchrun_single_node.sh bert_sample training.epochs=1
#
# torchrun exits with 1 for every failure; `trainer run` alone exits with the run's code (75: stopped and saved).
set -euo pipefail
exec torchrun --standalone --nproc-per-node "${PROCESSES:-gpu}" -m trainer run "$@"
