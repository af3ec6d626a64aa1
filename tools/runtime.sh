#!/usr/bin/env bash
# Decide where a target runs. Usage: tools/runtime.sh auto|docker|host
# Prints `docker` or `host`, and on standard error why; or one line that begins with `RUNTIME=` if it cannot be had.
# Environment: ENGINE, the command that speaks to the engine (docker; any that takes the same options, as podman).
set -euo pipefail
asked=${1:-auto} engine=${ENGINE:-docker}
oldest_driver=580 # what CUDA 13 asks for

answer() { # $1: docker or host; $2: why
    printf 'runtime: %s (%s)\n' "$1" "$2" >&2
    printf '%s\n' "$1"
    exit 0
}

driver() { # version of the NVIDIA driver; empty if there is no GPU, or none that answers
    local said code=0
    said=$(timeout 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || code=$?
    if ((code == 0)); then printf '%s\n' "${said%%$'\n'*}"; fi
    if ((code == 124)); then
        printf 'runtime: nvidia-smi does not answer, so no GPU is used: reboot, or install the driver again\n' >&2
    fi
}

too_old() { # $1: driver version
    [[ $1 =~ ^([0-9]+) ]] && ((BASH_REMATCH[1] < oldest_driver))
}

engine_problem() { # $1: driver version or empty. Why the engine cannot be used, and the remedy; empty if it can.
    local said
    if ! command -v "$engine" >/dev/null; then
        printf '%s is not installed' "$engine"
    elif ! said=$(timeout 20 "$engine" info 2>&1); then
        case $said in
            *"permission denied"*)
                printf 'your user may not speak to the %s daemon: sudo usermod -aG docker %s, then log in again' "$engine" "$(id -un)" ;;
            *) printf 'no %s daemon answers: start it, as in: sudo systemctl start docker' "$engine" ;;
        esac
    elif [[ -n $1 && ${said,,} != *nvidia* && ! -e /etc/cdi/nvidia.yaml && ! -e /var/run/cdi/nvidia.yaml ]]; then
        printf 'there is a GPU, but the engine has no GPU support: install the NVIDIA Container Toolkit, then: sudo nvidia-ctk runtime configure && sudo systemctl restart docker'
    fi
}

[[ $asked =~ ^(auto|docker|host)$ ]] || {
    printf 'RUNTIME=%s: not known (legal: auto, docker, host)\n' "$asked"
    exit 0
}
version=$(driver)
old=""
if too_old "$version"; then
    old="driver $version is older than $oldest_driver, which CUDA 13 needs: update it, or the GPU stays unused"
fi
[[ $asked != host ]] || answer host "as asked${old:+; $old}"
problem=$(engine_problem "$version")
if [[ $asked == docker ]]; then
    problem=${problem:-$old}
    [[ -z $problem ]] || {
        printf 'RUNTIME=docker: %s; or use RUNTIME=host\n' "$problem"
        exit 0
    }
    answer docker "as asked"
fi
[[ -z $problem ]] || answer host "$problem${old:+; $old}"
[[ -z $old ]] || answer host "$old"
answer docker "an engine answers${version:+ and has GPU support}; RUNTIME=host for a local environment"
