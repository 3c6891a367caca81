#!/bin/sh
# Entry point of the images: prints one line for each missing resource, then becomes `trainer`.
#
# The first word may also be a launcher, `python` or a shell; other words are arguments of `trainer`. Advice goes to
# stderr, and only before a training.
set -eu

here=$(dirname "$0")
# shellcheck source=docker/environment.sh
. "$here/environment.sh"

enough_shared_memory_kib=1048576 # NCCL uses some MiB for each pair of GPUs; loader workers pass whole batches

advise() {
    printf 'trainer image: %s\n' "$*" >&2
}

advise_on_shared_memory() {
    if [ ! -w /dev/shm ]; then
        advise "/dev/shm is missing or not writable, and NCCL and loader workers need it; add --shm-size 8g"
        return
    fi
    kib=$(($(stat -f -c '%b * %S / 1024' /dev/shm)))
    if [ "$kib" -lt "$enough_shared_memory_kib" ]; then
        advise "/dev/shm has $((kib / 1024)) MiB, too little for NCCL and loader workers; add --shm-size 8g, or --ipc host"
    fi
}

advise_on_folders() {
    if [ ! -w "${TMPDIR:-/tmp}" ]; then
        advise "${TMPDIR:-/tmp} is not writable; with --read-only add --tmpfs /tmp:exec"
    fi
    if [ -n "$lost_cache" ]; then
        advise "$lost_cache is not writable, so downloads and tokenised data go to $XDG_CACHE_HOME and end with the" \
            "container; mount a folder at /cache"
    fi
    if [ ! -w . ]; then
        advise "$(pwd) is not writable, and runs are saved below it; mount a folder there, or set checkpoint.folder"
    fi
}

sees_gpu() {
    for device in /dev/nvidia[0-9]* /dev/dxg; do # a pattern without a match stays as it is
        if [ -e "$device" ]; then
            return 0
        fi
    done
    return 1
}

advise_on_gpus() {
    if ! sees_gpu; then
        advise "no GPU is visible, so this trains on the CPU; add --gpus all (the host needs NVIDIA's container toolkit)"
        return
    fi
    # shellcheck disable=SC3045 # POSIX has no -l, but every shell of an image does
    lockable=$(ulimit -l)
    if [ "$lockable" != unlimited ]; then
        advise "only $lockable KiB of memory may be locked, and NCCL over InfiniBand needs more; add --ulimit memlock=-1"
    fi
}

case ${1:-} in
    run | torchrun | accelerate | deepspeed)
        advise_on_shared_memory
        advise_on_folders
        if [ "${TRAINER_IMAGE:-}" = cuda ]; then
            advise_on_gpus
        fi
        ;;
esac

case ${1:-} in
    torchrun | accelerate | deepspeed | python | sh | bash) exec "$@" ;;
    *) exec trainer "$@" ;;
esac
