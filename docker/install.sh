#!/bin/sh
# Installs trainer and its pinned dependencies into a fresh virtual environment.
#
#   docker/install.sh dependencies PREFIX   everything but trainer: the part of an image that rarely changes
#   docker/install.sh program PREFIX        trainer itself, with the shipped recipes
#
# Environment, all of it optional:
#   DEVICE           cpu (default) or cuda: which build of torch
#   TORCH_INDEX_URL  the index of torch; "default": pip's index
#   EXTRAS           optional dependencies of trainer (deepspeed tensorboard)
#   EXTRA_PACKAGES   more requirements in pip's syntax
#   HASHES           the file of SHA-256 sums (docker/hashes.txt); "none" for an index that builds its own files
#   PYTHON           the Python of the environment (python3)
set -eu

usage() {
    printf 'usage: %s dependencies|program PREFIX\n' "$0" >&2
    exit 2
}

pip_install() {
    "$prefix/bin/python" -m pip install --no-cache-dir --disable-pip-version-check --root-user-action ignore "$@"
}

install_dependencies() {
    case ${DEVICE:-cpu} in
        cpu) index=https://download.pytorch.org/whl/cpu ;;
        cuda) index=https://download.pytorch.org/whl/cu130 ;;
        *)
            printf 'DEVICE must be cpu or cuda, but is %s\n' "$DEVICE" >&2
            exit 2
            ;;
    esac
    index=${TORCH_INDEX_URL:-$index}
    "${PYTHON:-python3}" -m venv "$prefix"
    if [ "$index" != default ]; then
        # without dependencies: that index lacks most of their pinned versions
        pip_install --constraint "$root/constraints.txt" --no-deps --index-url "$index" torch
    fi
    requirements=$(mktemp)
    if [ "${HASHES:-}" != none ]; then
        # without dependencies: pip would want sums of torch and its CUDA packages, which are another build
        # shellcheck disable=SC2086 # a list of words
        "$prefix/bin/python" "$root/docker/requirements.py" --hashes "${HASHES:-$root/docker/hashes.txt}" \
            ${EXTRAS-deepspeed tensorboard} >"$requirements"
        PIP_BUILD_CONSTRAINT=$root/constraints.txt pip_install --require-hashes --no-deps --requirement "$requirements"
    fi
    # shellcheck disable=SC2086
    "$prefix/bin/python" "$root/docker/requirements.py" ${EXTRAS-deepspeed tensorboard} >"$requirements"
    # shellcheck disable=SC2086
    pip_install --constraint "$root/constraints.txt" --requirement "$requirements" ${EXTRA_PACKAGES:-}
    rm "$requirements"
}

install_program() {
    # pip has used two names for the constraints of build tools
    PIP_CONSTRAINT=$root/constraints.txt PIP_BUILD_CONSTRAINT=$root/constraints.txt pip_install --no-deps "$root"
    "$prefix/bin/python" -m pip check
}

[ $# -eq 2 ] || usage
root=$(cd "$(dirname "$0")/.." && pwd)
prefix=$2
case $1 in
    dependencies) install_dependencies ;;
    program) install_program ;;
    *) usage ;;
esac
