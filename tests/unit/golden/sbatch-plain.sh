#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=0-12:00:00
#SBATCH --job-name=train
#SBATCH --chdir="/home/u/run dir"
#SBATCH --output=/home/u/runs/train-1/logs/srun.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --requeue
#SBATCH --signal=TERM@120
# toolkit: 2 x 4 ranks
# shellcheck disable=SC2016
set -uo pipefail

toolkit_run=/home/u/runs/train-1
toolkit_restart=${SLURM_RESTART_COUNT:-0}
if [ "$toolkit_restart" -gt 0 ]; then
	toolkit_before="$toolkit_run"/before-restart-"$toolkit_restart"
	mkdir -p "$toolkit_before.part"
	mv -f "$toolkit_run"/{ranks,result*.json,logs/rank-*.log} "$toolkit_before.part" 2>/dev/null
	cp "$toolkit_run"/logs/srun.log "$toolkit_before.part"
	mv "$toolkit_before.part" "$toolkit_before"
	: >"$toolkit_run"/logs/srun.log
	mkdir "$toolkit_run"/ranks
fi
cd '/home/u/run dir' || exit 78  # Slurm goes on in /tmp where it is missing
echo "toolkit: job $SLURM_JOB_ID, restart $toolkit_restart, on $SLURM_JOB_NODELIST"
trap : TERM  # the ranks get it too; this script outlives them and records how they ended

unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_GPUS_PER_TASK SLURM_TRES_BIND SLURM_GPU_BIND  # said again below
export TOOLKIT_TARGET=slurm
export TOOLKIT_RUN_DIR="$toolkit_run"
export PYTHONUNBUFFERED=1
export TOOLKIT_LOG=1

srun --nodes=2 \
	--ntasks=8 \
	--ntasks-per-node=4 \
	--cpus-per-task=8 \
	--kill-on-bad-exit=1 \
	--export=ALL \
	--input=none \
	--label \
	/venv/bin/python -I -S "$toolkit_run"/entrypoint.pyz -- python train.py
toolkit_code=$?

toolkit_again=
[ "$toolkit_restart" -ge 50 ] || toolkit_again=result-"$toolkit_restart".json
for toolkit_python in /venv/bin/python python3; do
	if "$toolkit_python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then
		"$toolkit_python" -I -S "$toolkit_run"/entrypoint.pyz --finish "$toolkit_run" "$toolkit_code" ${toolkit_again:+"$toolkit_again"}
		toolkit_code=$?
		break
	fi
done
if [ "$toolkit_code" -eq 75 ] && [ -n "$toolkit_again" ]; then
	scontrol requeue "$SLURM_JOB_ID" ||
		mv "$toolkit_run"/"$toolkit_again" "$toolkit_run"/result.json
fi
exit "$toolkit_code"
