#!/usr/bin/env bash
# Build the whole Dockerfile on a stand-in base and run what is in it, on a machine without a container engine.
# Usage: make image-check     Needs root, podman, debootstrap, 30 GB of disk and a network; half an hour on two cores.
# Environment: BASE_IMAGE (default: Debian bookworm, made by debootstrap), KERNEL=1 (also compile one kernel file of
#   flash-attn), STEPS (how many training runs take; default: the whole smoke preset), DEBIAN_MIRROR, BUILD_OPTIONS (for podman build), KEEP=1 (leave the image).
# Looks at the committed state. The outcome goes to docs/image.md if all of it passed.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
base=${BASE_IMAGE:-localhost/standin:bookworm}
say() { printf '\nimage-check: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 2
}
((EUID == 0)) || fail "needs root, to make the stand-in base and to enter it: sudo make image-check"
for tool in podman debootstrap unshare; do
    command -v "$tool" >/dev/null || fail "no $tool: apt-get install podman buildah debootstrap util-linux"
done
work=$(mktemp -d "${TMPDIR:-/var/tmp}/image-check-XXXXXX")
trap 'rm -rf "$work"' EXIT

make_base() {
    podman image exists "$base" && return
    [[ -z ${BASE_IMAGE:-} ]] || fail "BASE_IMAGE=$base: podman has no such image"
    say "making $base"
    debootstrap --variant=minbase --include=ca-certificates bookworm "$work/root" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$work/log" ||
        fail "debootstrap: $(tail -n 1 "$work/log")"
    tar -C "$work/root" -c . | podman import --quiet - "$base" >/dev/null
    rm -rf "$work/root"
}

# How this machine reaches its package sources, if it has settings of its own.
machine_options() {
    local file
    printf 'native-tls = true\n' >"$work/uv.toml"
    printf -- '--volume=%s:/etc/uv/uv.toml:ro ' "$work/uv.toml"
    for file in /etc/ssl/certs/ca-certificates.crt /etc/pip.conf; do
        if [[ -f $file ]]; then printf -- '--volume=%s:%s:ro ' "$file" "$file"; fi
    done
    printf '%s' "${BUILD_OPTIONS:-}"
}

results=()
check() { # $1: what is shown; the rest: a command, run in the stranger's clone
    local what=$1 start=$SECONDS
    shift
    say "$what"
    chown -R 1000:1000 "$work/clone" # the user of compose.yaml
    if (cd "$work/clone" && "$@") >"$work/out" 2>&1; then
        results+=("| $what | passed | $((SECONDS - start)) s |")
        tail -n 3 "$work/out" >&2
    else
        results+=("| $what | **failed** | $((SECONDS - start)) s |")
        tail -n 30 "$work/out" >&2
    fi
}

smoke() { # the image alone: nothing mounted but empty volumes, a user without a name, a root that cannot be written
    mkdir -p "$work/volumes"/{data,runs,cache}
    chown -R 4321:4321 "$work/volumes"
    docker run --rm --read-only --tmpfs /tmp:exec --user 4321:4321 --env PRESET=smoke --env NGPU=1 \
        --volume "$work/volumes/data:/app/data" --volume "$work/volumes/runs:/app/runs" \
        --volume "$work/volumes/cache:/cache" lmms-engine:local recipes/qwen3_vl/launch.sh ${STEPS:+"trainer_args.max_steps=$STEPS"}
}
again() { smoke && grep -q 'finished at step.*nothing to do' "$work/out"; }
read_only() { # not even by root
    docker run --rm --read-only --tmpfs /tmp --user 0:0 lmms-engine:local \
        bash -c 'for place in /app /opt/venv /etc /usr; do if touch "$place/new"; then exit 1; fi; done; touch /tmp/new /cache/new'
}
bare() { docker run --rm --read-only --tmpfs /tmp:exec --user 4321:4321 lmms-engine:local "$@"; }
imports() { bare python -c 'import deepspeed, fla, liger_kernel, torch, wandb'; }
doctor() { # where the first run was
    docker run --rm --read-only --tmpfs /tmp:exec --user 4321:4321 --volume "$work/volumes/data:/app/data" \
        --volume "$work/volumes/runs:/app/runs" --volume "$work/volumes/cache:/cache" lmms-engine:local lmms-engine doctor
}
test_stage() {
    docker build --build-arg "BASE_IMAGE=$base" --target test --tag lmms-engine:test . &&
        docker run --rm --read-only --tmpfs /tmp lmms-engine:test python -m pytest -q -p no:cacheprovider tests/test_config.py
}
kernel() { # in the built root: its compiler and its torch, with this machine's nvcc
    local options=(--volume "${CUDA_HOME:-/usr/local/cuda}:/usr/local/cuda") file
    for file in /etc/ssl/certs/ca-certificates.crt /etc/pip.conf /etc/resolv.conf; do
        if [[ -f $file ]]; then options+=(--volume "$file:$file"); fi
    done
    docker run --rm --read-only --tmpfs /tmp:exec --network host --env TORCH_CUDA_ARCH_LIST=9.0 "${options[@]}" \
        lmms-engine:local tools/flash_attn.sh kernel /tmp/kernel
}

serves() { # $1: a command that answers on a port until it is stopped
    timeout 30 bash -c "$1" && return 1
    [[ $? == 124 ]] && grep -q 'http://' "$work/out"
}
container_commands() { # the fenced lines of README's section
    awk '/^## /{ inside = /^## In a container/ } inside && /^```/{ fenced = !fenced; next } inside && fenced' "$work/clone/README.md"
}

main() {
    local commands line steps="" note=""
    if [[ -n ${STEPS:-} ]]; then steps=trainer_args.max_steps=$STEPS note=", $STEPS steps"; fi
    make_base
    say "cloning"
    export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
    git clone --quiet --no-hardlinks "$repo" "$work/clone"
    mapfile -t commands < <(container_commands)
    ((${#commands[@]})) || fail "README.md has no commands under '## In a container'"
    mkdir "$work/bin"
    printf '#!/bin/sh\nexec %q %q "$@"\n' "$repo/.venv/bin/python" "$repo/tools/chroot_engine.py" >"$work/bin/docker"
    chmod +x "$work/bin/docker"
    export PATH=$work/bin:$PATH HOME=$work/home BASE_IMAGE=$base
    mkdir "$HOME"
    BUILD_OPTIONS=$(machine_options)
    export BUILD_OPTIONS

    podman untag lmms-engine:local 2>/dev/null || true # so that make builds; layers that are there are taken
    podman untag "$(cd "$work/clone" && tools/image.sh tag)" 2>/dev/null || true
    check "\`make build\`: every stage of the Dockerfile, hashes checked" make build
    if podman image exists lmms-engine:local; then
        check "the image's own engine: qwen3_vl's smoke preset$note, uid 4321, read-only, no network" smoke
        check "the same again: finished already" again
        check "nothing outside the volumes can be written" read_only
        check "deepspeed, flash-linear-attention, Liger and wandb import" imports
        check "\`lmms-engine doctor\`" doctor
        check "target \`test\` holds the suite" test_stage
        for line in "${commands[@]}"; do
            line=${line%%  *} # without its comment
            if [[ $line == *" up "* ]]; then
                check "README: \`$line\`" serves "$line"
            elif [[ $line == *launch.sh ]]; then
                check "README: \`$line\`$note" bash -c "$line $steps && wc -l runs/*/metrics.jsonl"
            else
                check "README: \`$line\`" env "ARGS=$steps" bash -c "$line"
            fi
        done
        if [[ ${KERNEL:-0} == 1 ]]; then check "one flash-attn kernel for sm_90" kernel; fi
        size=$(podman image inspect --format '{{.Size}}' lmms-engine:local)
    fi
    printf '%s\n' "${results[@]}"
    if [[ ${results[*]} == *failed* || -z ${size:-} ]]; then fail "not all of it passed; docs/image.md is left as it was"; fi
    {
        printf 'Last outcome: %s, commit %s, base %s, %s GB without the base.\n\n' "$(date -u +%F)" \
            "$(git -C "$work/clone" rev-parse --short HEAD)" "${base#localhost/}" "$(((size + 500000000) / 1000000000))"
        printf '| check | outcome | time |\n| --- | --- | --- |\n'
        printf '%s\n' "${results[@]}"
    } >"$work/outcome.md"
    sed -i -e "/^<!-- image-check -->/,/^<!-- end -->/{ /^<!-- image-check -->/r $work/outcome.md
/^<!--/!d }" "$repo/docs/image.md"
    if [[ ${KEEP:-0} != 1 ]]; then podman image rm --force lmms-engine:test lmms-engine:local >/dev/null; fi
    say "all passed; docs/image.md has the outcome"
}

main
