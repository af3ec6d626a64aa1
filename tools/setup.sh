#!/usr/bin/env bash
# Make .venv from requirements.lock when it is missing or stale; otherwise return at once.
# Usage: tools/setup.sh     Environment: PYTHON, the interpreter to build on (default: the first that fits).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
say() { printf 'set-up: %s\n' "$*" >&2; }

fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
    local candidates=("${PYTHON:-}") candidate
    [[ -n ${PYTHON:-} ]] || candidates=(python3 python3.11 python3.12 python3.13)
    for candidate in "${candidates[@]}"; do
        if fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    say "no usable Python (tried: ${candidates[*]}): install Python 3.11, 3.12 or 3.13 with its venv module" \
        "(Debian, Ubuntu: apt-get install python3-venv), or name one: make setup PYTHON=/path/to/python3.12"
    return 1
}

# What .venv was made of. A change of the first line rebuilds it; of the second, only reinstalls the project.
wanted_lock() { # $1: interpreter
    printf '%s %s %s\n' "$(sha256sum <requirements.lock | cut -d' ' -f1)" \
        "$("$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')" "$PWD"
}
wanted_project() { sha256sum <pyproject.toml | cut -d' ' -f1; }

current() {
    [[ -f .venv/stamp ]] && fits .venv/bin/python || return 1
    [[ $(sed -n 1p .venv/stamp) == "$(wanted_lock "${PYTHON:-.venv/bin/python}" 2>/dev/null)" ]]
}

writable_cache() {
    local cache=${XDG_CACHE_HOME:-${HOME:-/}/.cache}
    if mkdir -p "$cache/uv" 2>/dev/null && [[ -w $cache/uv ]]; then return; fi
    say "$cache cannot be written: packages are cached in .cache here (XDG_CACHE_HOME= names another place)"
    export XDG_CACHE_HOME=$PWD/.cache
}

install_lock() {
    local uv_lines packages
    packages=$(grep -c '^[A-Za-z0-9._-]*==' requirements.lock)
    uv_lines=$(mktemp)
    # uv at the lock's own version and hash; the block of a package ends at the next unindented line.
    awk '/^[^ ]/ { inside = /^uv==/ } inside' requirements.lock >"$uv_lines"
    if .venv/bin/python -m pip install -qq --require-hashes --no-deps -r "$uv_lines" >&2; then
        say "installing the $packages packages of requirements.lock with uv"
        # compiled now, once: where PYTHONDONTWRITEBYTECODE is set, every start would compile all of it again
        .venv/bin/uv pip install --quiet --python .venv/bin/python --compile-bytecode \
            --build-constraints requirements.lock --require-hashes -r requirements.lock
    else
        say "uv could not be installed; installing the $packages packages of requirements.lock with pip (slower)"
        .venv/bin/python -m pip install -qq --require-hashes -r requirements.lock >&2
    fi
    rm -f "$uv_lines"
}

install_project() { # hatchling comes from the lock, so nothing unpinned is fetched
    local install=(.venv/bin/python -m pip install -qq)
    [[ -x .venv/bin/uv ]] && install=(.venv/bin/uv pip install --quiet)
    VIRTUAL_ENV=$PWD/.venv "${install[@]}" --no-deps --no-build-isolation -e . >&2
}

exec 9>.venv.lock
flock -n 9 || { say "another set-up is at work; waiting"; flock 9; }
if ! current; then
    start=$SECONDS
    python=$(find_python)
    say "making .venv on $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
    writable_cache
    export DS_BUILD_OPS=0 # deepspeed comes as source; its ops are built at first use, not here
    install_lock
    install_project
    { wanted_lock .venv/bin/python && wanted_project; } >.venv/stamp.new
    mv .venv/stamp.new .venv/stamp # written last: an interrupted set-up starts anew
    say "done in $((SECONDS - start)) s"
elif [[ $(sed -n 2p .venv/stamp) != "$(wanted_project)" ]]; then
    say "pyproject.toml changed; installing the project again"
    writable_cache
    install_project
    { sed -n 1p .venv/stamp && wanted_project; } >.venv/stamp.new
    mv .venv/stamp.new .venv/stamp
fi
