#!/usr/bin/env bash
# Start a rank for each GPU of this node, and exit with the code of the first rank that fails.
#
#   NODES=2 GPUS=8 NODE_RANK=0 MASTER_ADDR=node0 launchers/ranks.sh bert_base_mrpc
#
# The scripts of Kubernetes, SkyPilot and Ray hold this text. torchrun would replace the exit codes by 1.
set -u
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500} WORLD_SIZE=$((NODES * GPUS)) LOCAL_WORLD_SIZE=$GPUS
ranks=()
trap 'kill -TERM "${ranks[@]}" 2>/dev/null || true' TERM INT
for ((local = 0; local < GPUS; local++)); do
    RANK=$((NODE_RANK * GPUS + local)) LOCAL_RANK=$local trainer run "$@" &
    ranks+=($!)
done
# After the first failure, the other ranks have a minute to report. A signal ends a wait, not the rank.
# Check the ranks in turn: `wait -n` misses a rank that ends during the wait for another.
code=0
while ((${#ranks[@]} > 0)); do
    sleep 0.2 &
    wait $!
    running=()
    for rank in "${ranks[@]}"; do
        if kill -0 "$rank" 2>/dev/null; then
            running+=("$rank")
            continue
        fi
        wait "$rank"
        status=$?
        if ((status != 0 && code == 0)); then
            code=$status
            until=$((SECONDS + 60))
        fi
    done
    if ((code != 0 && SECONDS >= until && ${#running[@]} > 0)); then
        kill -KILL "${running[@]}"
    fi
    ranks=(${running[@]+"${running[@]}"})
done
exit "$code"
