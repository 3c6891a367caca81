#!/bin/sh
# Health check: succeeds if `trainer doctor` finds no problem. Only exit codes 0 and 1 are allowed.
set -eu

# shellcheck source=docker/environment.sh
. "$(dirname "$0")/environment.sh"

trainer doctor 2>&1 || exit 1
