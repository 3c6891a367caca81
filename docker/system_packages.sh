#!/bin/sh
# System packages of every stage: Python, a compiler for `compile` on CPUs, an init process that reaps orphans, and the
# libraries of rdma-core, which NCCL opens at run time; without them it uses sockets instead of InfiniBand.
set -eu

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends ca-certificates g++ ibverbs-providers libibverbs1 python3 python3-dev \
    python3-venv tini
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
