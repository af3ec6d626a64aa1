#!/usr/bin/env bash
# First command of the image: looks at what may be written, says what it runs, and becomes it.
# What would stop a run later, and with a worse message, is said here in one line with its remedy.
set -euo pipefail
say() { printf 'image: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 2
}
can_write() { # $1: a folder, which may not be there yet
    local folder=$1
    while [[ ! -e $folder ]]; do folder=$(dirname "$folder"); done
    [[ -d $folder && -w $folder ]]
}
free_mb() { df -Pm "$1" 2>/dev/null | awk 'END { print $4 }'; }
uid=$(id -u)

can_write /tmp || fail "nothing can be written to /tmp: start with --tmpfs /tmp:exec (Kubernetes: an emptyDir)"
if ! can_write "${HOME:-/}"; then
    say "HOME=${HOME:-} is read-only for uid $uid; using /tmp in its place"
    export HOME=/tmp
fi
if ! can_write "${XDG_CACHE_HOME:-/cache}"; then
    say "/cache is read-only for uid $uid: compiled kernels are lost when the container ends; mount a volume that uid $uid may write"
    export XDG_CACHE_HOME=/tmp/cache TRITON_CACHE_DIR=/tmp/cache/triton TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor \
        TORCH_EXTENSIONS_DIR=/tmp/cache/torch_extensions MPLCONFIGDIR=/tmp/cache/matplotlib
fi
for name in TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TORCH_EXTENSIONS_DIR MPLCONFIGDIR; do # made by an earlier user
    folder=${!name:-}
    if [[ -n $folder ]] && ! can_write "$folder"; then
        say "$folder is not writable for uid $uid, so what it keeps is lost when the container ends;" \
            "on the volume: sudo chown -R $uid ${folder##*/}"
        export "$name=/tmp/cache/${folder##*/}"
    fi
done
hub=${HF_HOME:-/cache/huggingface}
{ can_write "$hub" && can_write "$hub/hub"; } ||
    say "$hub is read-only for uid $uid: weights in it are used, others cannot be fetched; mount a folder of uid $uid there"

case "${1:-} ${2:-} ${3:-} " in # what writes runs; also by way of bash -c
    *launch.sh\ * | *lmms_engine.launch.cli\ * | torchrun\ * | make\ train\ * | make\ prep\ * | make\ expected\ * | make\ verify\ * | make\ reproduce\ *) writes=1 ;;
    *) writes="" ;;
esac
for folder in data runs; do
    if [[ -n $writes ]] && ! can_write "$PWD/$folder"; then
        if [[ -L $folder && ! -e $folder ]]; then
            to=$(readlink "$folder")
            fail "$PWD/$folder is a link to $to, which is not in the container: mount that too, --volume $to:$to"
        fi
        owner=$(stat -c %u "$folder" 2>/dev/null || stat -c %u .)
        remedy="on the host: sudo chown -R $uid $folder"
        [[ $owner == 0 ]] || remedy="start as its owner (--user $owner; compose: RUN_UID=$owner in .env), or $remedy"
        if [[ $owner == "$uid" || $(stat -c %A "$folder" 2>/dev/null) == *w[tx] ]]; then
            fail "$PWD/$folder is read-only here: mount a folder there that can be written, --volume <folder>:$PWD/$folder"
        fi
        fail "$PWD/$folder belongs to uid $owner and is not writable for uid $uid: $remedy"
    fi
done
if [[ -n $writes ]]; then
    free=$(free_mb runs || true)
    ((${free:-9999} >= 2000)) ||
        say "only $free MB are free for $PWD/runs: checkpoints may not fit; make room, or mount a larger disk there"
    shared=$(free_mb /dev/shm || true)
    ((${shared:-9999} >= 500)) ||
        say "only $shared MB of shared memory: loader workers may die of a bus error; start with --ipc host or --shm-size 8g"
    driver=$(timeout 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
    if [[ $driver =~ ^([0-9]+) ]] && ((BASH_REMATCH[1] < 580)); then
        say "driver $driver is older than 580, which CUDA 13 needs: update it on the host, or the GPU stays unused"
    fi
fi
if [[ -z ${LMMS_IMAGE_LOCK_SHA256:-} && -f /opt/venv/lock.sha256 ]]; then
    read -r LMMS_IMAGE_LOCK_SHA256 _ </opt/venv/lock.sha256
fi
export LMMS_IMAGE_LOCK_SHA256=${LMMS_IMAGE_LOCK_SHA256:-}
command=$(printf '%q ' "$@")
say "commit ${LMMS_IMAGE_COMMIT:-not recorded}, lock ${LMMS_IMAGE_LOCK_SHA256:0:12}, uid $uid; running: ${command% }"
exec "$@"
