#!/bin/sh
# System packages of every stage: Python, a compiler for DeepSpeed, and an init process that reaps orphans.
set -eu

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv tini
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
