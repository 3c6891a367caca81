#!/bin/sh
# The system's packages of every stage: Python, what compiles (DeepSpeed does), and a process 1 that reaps.
set -eu

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv tini
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
