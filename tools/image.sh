#!/usr/bin/env bash
# The image: build it, run commands in it, push it.
# Usage: tools/image.sh tag | build | push REFERENCE | run COMMAND [ARGUMENT ...]
# Environment: ENGINE (docker), FLASH_ATTN=1, TORCH_CUDA_ARCH_LIST, MAX_JOBS, BASE_IMAGE, and BUILD_OPTIONS and
#   RUN_OPTIONS, more options for the engine, as in BUILD_OPTIONS="--network host". More: docs/image.md
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
engine=${ENGINE:-docker}
needed_gb=40 # base 9, environment 8, and room for what the builder unpacks
say() { printf 'image: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 2
}
short_hash() { sha256sum | cut -c 1-10; }

tag() { # changes with the lock and the Dockerfile alone: code is mounted, or comes last
    local flash=""
    if [[ ${FLASH_ATTN:-0} == 1 ]]; then
        flash=-fa$({ cat requirements-flash-attn.lock tools/flash_attn.sh && printf '%s' "${TORCH_CUDA_ARCH_LIST:-}"; } | short_hash)
    fi
    printf 'lmms-engine:%s-%s%s\n' "$(short_hash <requirements.lock)" \
        "$({ cat Dockerfile && printf '%s' "${BASE_IMAGE:-}"; } | short_hash)" "$flash"
}

commit() {
    local changed=""
    [[ -z $(git status --porcelain --untracked-files=no 2>/dev/null) ]] || changed=-changed
    printf '%s%s\n' "$(git rev-parse HEAD 2>/dev/null || true)" "$changed"
}

require_engine() {
    local decided
    decided=$(tools/runtime.sh docker 2>/dev/null)
    [[ $decided == docker ]] || {
        decided=${decided#RUNTIME=docker: }
        fail "${decided%; or use RUNTIME=host}" # which has no image
    }
}

require_space() {
    local root free_gb
    root=$("$engine" info --format '{{.DockerRootDir}}' 2>/dev/null || "$engine" info --format '{{.Store.GraphRoot}}' 2>/dev/null || true)
    [[ -d $root ]] || return 0 # the engine is on another machine, or keeps its folder to itself
    free_gb=$(($(df -Pk "$root" | awk 'END { print $4 }') / 1000000))
    ((free_gb >= needed_gb)) ||
        fail "$free_gb GB are free where $engine keeps its images ($root), the build needs $needed_gb: make room, as in: $engine system prune"
}

build() {
    local name log options=() extra=()
    name=$(tag)
    # What is pushed runs where no checkout is mounted: it must hold the code of now.
    if [[ -z ${PUSH:-} ]] && "$engine" image inspect "$name" >/dev/null 2>&1; then return; fi
    require_engine
    require_space
    mkdir -p data runs .cache # by this user: the engine would make them for root
    for option in FLASH_ATTN TORCH_CUDA_ARCH_LIST MAX_JOBS BASE_IMAGE; do
        if [[ -n ${!option:-} ]]; then options+=(--build-arg "$option=${!option}"); fi
    done
    read -ra extra <<<"${BUILD_OPTIONS:-}"
    log=$(mktemp)
    say "building $name"
    DOCKER_BUILDKIT=1 "$engine" build --target runtime -t "$name" -t lmms-engine:local "${options[@]}" \
        --build-arg "GIT_COMMIT=$(commit)" --build-arg "LOCK_SHA256=$(sha256sum <requirements.lock | cut -d' ' -f1)" \
        "${extra[@]}" . 2>&1 | tee "$log" >&2 || explain "$log"
    rm -f "$log"
}

explain() { # $1: what a failed build said
    local said="see above; disk: $engine system df, again from nothing: BUILD_OPTIONS=--no-cache"
    if grep -qiE 'no space left' "$1"; then
        said="the disk is full: make room, as in: $engine system prune"
    elif grep -qiE 'no such host|server misbehaving|tls handshake timeout|network is unreachable|could not resolve|temporary failure|name or service not known|i/o timeout|connection refused|dns error' "$1"; then
        said="no network: the first build fetches the base and the packages. Build where there is one, then carry it over: make build PUSH=<registry>/<name>, or $engine save $(tag) and $engine load"
    fi
    if grep -qE 'E: Version .* was not found' "$1"; then
        said="the distribution no longer has a pinned system package: renew SYSTEM_PACKAGES in the Dockerfile"
    elif grep -qiE 'toomanyrequests|pull rate limit' "$1"; then
        said="the registry of the base wants you to wait, or to log in: $engine login"
    elif grep -qi 'buildx' "$1"; then
        said="docker's builder is missing: install the package docker-buildx-plugin (Debian, Ubuntu: docker-buildx)"
    elif grep -qi 'unqualified-search' "$1"; then
        said="$engine knows no registry for names without one: set unqualified-search-registries in /etc/containers/registries.conf to the one that has nvidia/cuda"
    fi
    rm -f "$1"
    fail "the build failed: $said"
}

push() { # $1: where to, as in registry.example/team/lmms-engine
    local name reference=$1
    name=$(tag)
    [[ ${reference##*/} == *:* ]] || reference=$reference:${name#*:}
    if ! { "$engine" tag "$name" "$reference" && "$engine" push "$reference"; }; then
        fail "PUSH=$1: not pushed; log in first ($engine login), and give a name as in registry.example/team/lmms-engine"
    fi
    say "pushed $reference"
}

run() {
    local name hub options=() extra=() variable folder
    build
    name=$(tag)
    hub=${HF_HOME:-${HOME:-}/.cache/huggingface}
    for folder in data runs .cache/image .venv; do # by this user: the engine would make them for root, or could not
        mkdir -p "$folder" 2>/dev/null ||
            fail "$PWD/$folder cannot be made: the checkout is read-only for you, or it is a link to what is not there"
    done
    mkdir -p "$hub" 2>/dev/null ||
        fail "$hub cannot be made: your home is read-only? Name a folder that can be written: HF_HOME=/path make …"
    options=(--rm --pull never --read-only --tmpfs /tmp:exec --user "$(id -u):$(id -g)" --ipc host
        --stop-timeout 300 # on SIGTERM every rank saves
        --volume "$PWD:/app"
        --tmpfs /app/.venv # an environment of the host would be taken for the image's
        --volume "$PWD/.cache/image:/cache" --volume "$hub:/cache/huggingface"
        --env "LMMS_IMAGE_DIGEST=$("$engine" image inspect --format '{{.Id}}' "$name")")
    for folder in data runs; do # a link to another disk points out of the checkout
        if [[ -L $folder ]]; then options+=(--volume "$(realpath "$folder"):$(realpath "$folder")"); fi
    done
    for variable in RECIPE PRESET NGPU FRESH ARGS RUN NNODES NODE_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS \
        CUDA_VISIBLE_DEVICES HF_TOKEN HF_ENDPOINT HF_HUB_OFFLINE WANDB_API_KEY WANDB_MODE WANDB_PROJECT WANDB_ENTITY \
        NCCL_DEBUG NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME; do
        if [[ -n ${!variable:-} ]]; then options+=(--env "$variable"); fi
    done
    if timeout 20 nvidia-smi -L >/dev/null 2>&1; then
        if [[ $engine == *podman ]]; then options+=(--device nvidia.com/gpu=all); else options+=(--gpus all); fi
    fi
    if [[ $engine == *podman && $(id -u) != 0 ]]; then
        options+=(--userns keep-id) # without root limits cannot be raised: they stay those of this shell
    else
        options+=(--ulimit memlock=-1 --ulimit stack=67108864)
    fi
    if ((${NNODES:-1} > 1)); then options+=(--network host); fi
    if [[ -t 0 && -t 1 ]]; then options+=(--interactive --tty); fi
    read -ra extra <<<"${RUN_OPTIONS:-}"
    exec "$engine" run "${options[@]}" "${extra[@]}" "$name" "$@"
}

case ${1:-} in
    tag) tag ;;
    build)
        build
        "$engine" tag "$(tag)" lmms-engine:local # an image of other settings may have been the last
        say "$(tag) is there, also as lmms-engine:local"
        if [[ -n ${PUSH:-} ]]; then push "$PUSH"; fi
        ;;
    push) push "${2:?give a name as in registry.example/team/lmms-engine}" ;;
    run) shift && run "$@" ;;
    *) fail "usage: $0 tag | build | push REFERENCE | run COMMAND [ARGUMENT ...]" ;;
esac
