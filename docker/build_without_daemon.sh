#!/bin/sh
# Build trainer:cpu without a Docker engine: with buildah, in a chroot, on a base built from Debian's packages.
#
#   docker/build_without_daemon.sh FOLDER [ARGUMENT OF buildah build ...]
#
# Needs root and Debian's packages buildah and mmdebstrap. All images lie in FOLDER; `rm -rf` it when done.
set -eu

[ $# -ge 1 ] || {
    printf 'usage: %s FOLDER [ARGUMENT OF buildah build ...]\n' "$0" >&2
    exit 2
}
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."

with_storage() {
    command=$1
    shift
    buildah --root "$folder/storage" --runroot "$folder/run" --storage-driver "${STORAGE_DRIVER:-vfs}" "$command" "$@"
}

if ! with_storage inspect --type image localhost/trainer-base >/dev/null 2>&1; then
    mmdebstrap --variant=minbase bookworm "$folder/base.tar"
    container=$(with_storage from scratch)
    with_storage add "$container" "$folder/base.tar" /
    with_storage commit --rm "$container" localhost/trainer-base
    rm "$folder/base.tar"
fi

# One layer for each stage: without overlayfs, each layer is a whole copy. DEVICE repeats its default, because
# buildah 1.28 does not resolve a stage name that holds a default.
with_storage build --isolation chroot --layers=false --format docker --file docker/Dockerfile --tag trainer:cpu \
    --build-arg DEVICE=cpu --build-arg CPU_IMAGE=localhost/trainer-base --build-arg CPU_DIGEST= "$@" .
