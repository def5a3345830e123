#!/usr/bin/env bash
# shellcheck disable=SC2016,SC2317
# toolkit run: 2 x 4 ranks in job 12
(
set -euo pipefail
cd /home/u/proj
/venv/bin/python -P -m toolkit.run_dir /home/u/proj/runs/train-1 '{}'
unset SLURM_NTASKS
export TOOLKIT_TARGET=slurm
export TOOLKIT_RUN_DIR=/home/u/proj/runs/train-1
export PYTHONUNBUFFERED=1
export NOTE='it'"'"'s $5; ok'
exec \
srun --jobid=12 --overlap --nodes=2 --ntasks=8 --ntasks-per-node=4 --job-name=train --kill-on-bad-exit=1 --export=ALL --input=none --label /venv/bin/python -I -S /home/u/proj/runs/train-1/entrypoint.pyz -- python train.py
)
