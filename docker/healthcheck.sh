#!/bin/sh
# Whether `trainer doctor` finds no problem here. A health check may leave with 0 or 1 and nothing else.
set -eu

# shellcheck source=docker/environment.sh
. "$(dirname "$0")/environment.sh"

trainer doctor 2>&1 || exit 1
