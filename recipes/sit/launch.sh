#!/usr/bin/env bash
# Train this recipe. Usage: launch.sh [key=value ...]; under Slurm: srun --ntasks-per-node=1 launch.sh
# Environment: PRESET NGPU FRESH NNODES NODE_RANK MASTER_ADDR MASTER_PORT (docs/training.md)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
recipe=recipes/${here##*/}
if [[ -d .venv/bin && -z ${LMMS_IMAGE_BASE:-} ]]; then PATH=$PWD/.venv/bin:$PATH; fi # the image has its own
nnodes=${NNODES:-${SLURM_STEP_NUM_NODES:-1}}
node_rank=${NODE_RANK:-${SLURM_NODEID:-0}}
if [[ -z ${MASTER_ADDR:-} && -n ${SLURM_STEP_NODELIST:-} ]]; then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | sed -n 1p)
fi
mkdir -p data
flock data/.prepare.lock python "$recipe/prepare.py" --if-missing
choice=$(python -m lmms_engine.launch.preset --preset "${PRESET:-auto}" --ngpu "${NGPU:-0}" "$recipe" "$@")
read -r preset processes <<<"$choice" # why this preset: printed to stderr
configs=(--config "$recipe/config.yaml")
if [[ $preset == smoke ]]; then configs+=(--config "$recipe/smoke.yaml"); fi
if [[ ${FRESH:-0} == 1 ]]; then configs+=(--fresh); fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + processes - 1) / processes))}
rendezvous=(--standalone) # one node: a free port, so that runs do not collide
if ((nnodes > 1)); then
    rendezvous=(--node-rank "$node_rank" --master-addr "${MASTER_ADDR:?}" --master-port "${MASTER_PORT:-29500}")
fi
exec torchrun --nnodes "$nnodes" --nproc-per-node "$processes" "${rendezvous[@]}" \
    --logs-specs lmms_engine --signals-to-handle SIGINT,SIGHUP,SIGQUIT \
    -m lmms_engine.launch.cli "${configs[@]}" "trainer_args.output_dir=runs/${recipe#*/}-$preset" "$@"
