#!/usr/bin/env bash
# One machine under torchrun: one rank for each GPU, or PROCESSES ranks.
#
#   PROCESSES=2 launchers/torchrun_single_node.sh bert_sample training.epochs=1
#
# torchrun answers 1 for every failure; `trainer run` alone hands the run's own exit code through (75: stopped and saved).
set -euo pipefail
exec torchrun --standalone --nproc-per-node "${PROCESSES:-gpu}" -m trainer run "$@"
