#!/usr/bin/env bash
# Compile flash-attn from its own lock, for the environment whose python comes first on PATH.
# Usage: tools/flash_attn.sh wheel FOLDER            the whole package, as the image's stage does; an hour on many cores
#        tools/flash_attn.sh kernel FOLDER [NAME]    one kernel file with the same flags, to prove the toolchain; minutes
# Environment: TORCH_CUDA_ARCH_LIST ("8.0;9.0"), MAX_JOBS (default: what cores and memory allow), CUDA_HOME.
set -euo pipefail
say() { printf 'flash-attn: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 2
}
what=${1:-} out=${2:-} kernel=${3:-flash_fwd_hdim64_bf16_causal_sm80}
[[ $what == wheel || $what == kernel ]] && [[ -n $out ]] || fail "usage: $0 wheel|kernel FOLDER [NAME]"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
lock=$here/requirements-flash-attn.lock # beside this file in the image's stage, one folder up in a checkout
[[ -f $lock ]] || lock=${here%/*}/requirements-flash-attn.lock
mkdir -p "$out"
out=$(cd "$out" && pwd)

# The package has a variable of its own for architectures and ignores torch's.
archs=()
IFS=';, ' read -ra wanted <<<"${TORCH_CUDA_ARCH_LIST:-8.0;9.0}"
for arch in "${wanted[@]}"; do
    case $arch in
        8.0 | 9.0 | 10.0 | 12.0) archs+=("${arch/./}") ;;
        *) fail "TORCH_CUDA_ARCH_LIST has $arch: flash-attn has kernels for 8.0, 9.0, 10.0 and 12.0 (8.6 and 8.9 run those of 8.0)" ;;
    esac
done
FLASH_ATTN_CUDA_ARCHS=$(IFS=';' && printf '%s' "${archs[*]}")
nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
[[ -x $nvcc ]] || fail "no nvcc in ${nvcc%/*}: build on a CUDA devel base, or set CUDA_HOME"
CUDA_HOME=${nvcc%/bin/nvcc}
export CUDA_HOME FLASH_ATTN_CUDA_ARCHS
export FLASH_ATTENTION_FORCE_BUILD=TRUE # or its set-up would fetch a ready binary that no lock covers
export NVCC_THREADS=2                   # 4 need 9 GB of memory for each job
if [[ -z ${MAX_JOBS:-} ]]; then unset MAX_JOBS; fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Its build tool goes beside the environment, not into it.
awk '/^[^ ]/ { inside = /^wheel==/ } inside' "$lock" >"$scratch/build.lock"
python -m pip install -q --require-hashes --no-deps --target "$scratch/tools" -r "$scratch/build.lock"
export PYTHONPATH=$scratch/tools
awk '/^[^ ]/ { inside = /^flash-attn==/ } inside' "$lock" >"$scratch/package.lock"
say "$what for ${FLASH_ATTN_CUDA_ARCHS} with $("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/nvcc \1/p')"

if [[ $what == wheel ]]; then
    python -m pip wheel -q --require-hashes --no-deps --no-build-isolation -w "$out" -r "$scratch/package.lock"
    exit
fi
# pip asks the source for its metadata after the download, which needs no compiler.
FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE python -m pip download -q --require-hashes --no-deps --no-build-isolation \
    --no-binary :all: -d "$scratch" -r "$scratch/package.lock"
tar -xzf "$scratch"/flash_attn-*.tar.gz -C "$scratch" --strip-components 1 --one-top-level=source
# In place of ninja: build the one object of the file that set-up has just written, then stop it before it links.
real=$(command -v ninja)
mkdir "$scratch/bin"
cat >"$scratch/bin/ninja" <<STANDIN
#!/usr/bin/env bash
[[ \${1:-} != --version ]] || exec "$real" "\$@"
object=\$(sed -n 's/^build \(.*$kernel\.o\): .*/\1/p' build.ninja)
"$real" -t commands "\$object" >"$out/command.txt" && "$real" -v "\$object" && cp "\$object" "$out/$kernel.o"
exit 1
STANDIN
chmod +x "$scratch/bin/ninja"
start=$SECONDS
(cd "$scratch/source" && PATH=$scratch/bin:$PATH python setup.py build_ext >"$out/log.txt" 2>&1) || true
[[ -s $out/$kernel.o ]] || fail "$kernel.cu did not compile; see $out/log.txt"
say "$kernel.cu compiled in $((SECONDS - start)) s for $(grep -aoE 'arch sm_[0-9]+' "$out/$kernel.o" | sort -u | paste -sd ' '): $out/$kernel.o"
