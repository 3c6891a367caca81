#!/usr/bin/env bash
# Several machines under torchrun: start this on each of them, with its own NODE_RANK.
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=node0 launchers/torchrun_multi_node.sh bert_base_mrpc
#   NODES=2 NODE_RANK=1 MASTER_ADDR=node0 launchers/torchrun_multi_node.sh bert_base_mrpc
#
# MASTER_ADDR is the machine of NODE_RANK 0; MASTER_PORT must be free there and open to the others. All machines must
# share `checkpoint.folder`.
#
# RENDEZVOUS=c10d lets torchrun assign the ranks. ADDRESS is then the address of this machine, if its name does not
# resolve to it. After a failure, start the same command on all machines: they resume from the last checkpoint. With
# c10d and RESTARTS=N they restart by themselves, N times at most. A lost machine may return alone, except the one at
# MASTER_ADDR, which hosts the rendezvous.
# NODES=MIN:MAX needs RENDEZVOUS=c10d and `parallel.elastic` in the recipe. Machines then join and leave. RENDEZVOUS_CONF adds
# settings of torchrun's rendezvous, such as last_call_timeout=10.
# c10d reads pickles from MASTER_PORT: whoever can connect can run code. Use it in a closed network only.
set -euo pipefail

ARGUMENTS=("$@")
FOLDER=$PWD # where relative paths begin
VENV=${VENV:-}
NODES=${NODES:?number of machines, or MIN:MAX}
PROCESSES=${PROCESSES:-gpu}
MASTER_ADDR=${MASTER_ADDR:?address of machine 0}
MASTER_PORT=${MASTER_PORT:-29500}
RENDEZVOUS=${RENDEZVOUS:-static}
RESTARTS=${RESTARTS:-0}

cd -- "$FOLDER"
if [[ -n $VENV ]]; then
    PATH=$VENV/bin:$PATH
fi
ranks=$PROCESSES
if [[ $PROCESSES == gpu ]]; then
    ranks=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || true # without the program there is none
fi
if [[ $ranks =~ ^[1-9][0-9]*$ ]]; then # torchrun would set one thread
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > ranks ? $(nproc) / ranks : 1))}
fi
options=(--nnodes "$NODES" --nproc-per-node "$PROCESSES" --max-restarts "$RESTARTS")
if [[ $RENDEZVOUS == c10d ]]; then
    # A machine without a connection reports it after read_timeout seconds; one that waits alone, after join_timeout.
    options+=(--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "${JOB:-trainer}")
    # With a kept store, torchrun does not send the address of the rendezvous to late machines.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    options+=(--rdzv-conf "join_timeout=${JOIN_SECONDS:-600},read_timeout=45${RENDEZVOUS_CONF:+,$RENDEZVOUS_CONF}"
        ${ADDRESS:+--local-addr "$ADDRESS"})
else
    options+=(--node-rank "${NODE_RANK:?number of this machine, from 0}")
    options+=(--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
    options+=(--rdzv-conf "timeout=${JOIN_SECONDS:-600}")
    # torchrun is silent while the address does not answer, so try to connect first.
    told=
    while ((NODE_RANK > 0)); do
        # shellcheck disable=SC2016 # the inner shell expands them
        why=$(timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$MASTER_ADDR" "$MASTER_PORT" 2>&1) && break
        why=${why%%$'\n'*}
        if [[ -z $told ]] && ((SECONDS >= 20 || SECONDS >= ${JOIN_SECONDS:-600})); then
            told=yes
            echo "$(hostname) cannot reach $MASTER_ADDR:$MASTER_PORT yet (${why:-no answer}); see that machine 0 was" \
                "started, that MASTER_ADDR is its address and that the port is open" >&2
        fi
        if ((SECONDS >= ${JOIN_SECONDS:-600})); then
            exit 1
        fi
        sleep 1
    done
fi
exec torchrun "${options[@]}" --no-python trainer run "${ARGUMENTS[@]}"
