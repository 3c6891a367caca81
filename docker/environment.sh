# shellcheck shell=sh disable=SC2034 # the entry point reports `lost_cache`
# The entry point and the health check source this file: an arbitrary `--user` has no home and no name, and a read-only
# root has no cache. A health check does not run through the entry point.

if [ -z "${HOME:-}" ] || [ ! -w "$HOME" ]; then
    HOME=${TMPDIR:-/tmp}
    export HOME
fi
if ! id -un >/dev/null 2>&1; then
    LOGNAME=uid$(id -u) # Python's getpass fails for a number without a name
    export LOGNAME
fi
lost_cache=
if [ -n "${XDG_CACHE_HOME:-}" ] && [ ! -w "$XDG_CACHE_HOME" ]; then
    lost_cache=$XDG_CACHE_HOME
    XDG_CACHE_HOME=${TMPDIR:-/tmp}/cache
    export XDG_CACHE_HOME
fi
