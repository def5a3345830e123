#!/usr/bin/env bash
# shellcheck disable=SC2016,SC2317
# toolkit run: 2 x 4 ranks through srun
(
set -euo pipefail
cd /home/u/proj
/venv/bin/python -P -m toolkit.run_dir /home/u/proj/runs/train-1 '{}'
export TOOLKIT_TARGET=slurm
export TOOLKIT_RUN_DIR=/home/u/proj/runs/train-1
export PYTHONUNBUFFERED=1
exec \
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=4 --gpu-bind=none --job-name=train --kill-on-bad-exit=1 --export=ALL --input=none --label /venv/bin/python -I -S /home/u/proj/runs/train-1/entrypoint.pyz --agent 4 -- sh -c 'exec "$0" -m torch.distributed.run --nnodes=2 --nproc-per-node=4 --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --no-python "$@"' python /venv/bin/python -I -S /home/u/proj/runs/train-1/entrypoint.pyz -- python train.py
)
