#!/usr/bin/env bash
# shellcheck disable=SC2016,SC2317
# toolkit run: 2 x 2 ranks through srun
(
set -euo pipefail
cd /home/u/proj
/venv/bin/python -P -m toolkit.run_dir /home/u/proj/runs/train-1 '{}'
export TOOLKIT_TARGET=slurm
export TOOLKIT_RUN_DIR=/toolkit-run
export PYTHONUNBUFFERED=1
exec \
srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=none --job-name=train --kill-on-bad-exit=1 --export=ALL --input=none --label '--container-image=nvcr.io#nvidia/pyg:24.01-py3' --container-mounts=/home/u/proj:/workspace,/home/u/proj/runs/train-1:/toolkit-run --container-workdir=/workspace --no-container-mount-home --container-env=TOOLKIT_TARGET,TOOLKIT_RUN_DIR,PYTHONUNBUFFERED python3 -I -S /toolkit-run/entrypoint.pyz -- python3 distributed_sampling_multinode.py
)
