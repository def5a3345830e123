#!/usr/bin/env bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --ntasks-per-node=1
#SBATCH --job-name=train
#SBATCH --chdir="/home/u/run dir"
#SBATCH --output=/home/u/runs/train-1/logs/srun.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --no-requeue
#SBATCH --signal=USR2@300
#SBATCH --hold
#SBATCH --comment="a # b" --mail-type END
# toolkit: 1 x 1 ranks
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

srun --nodes=1 \
	--ntasks=1 \
	--ntasks-per-node=1 \
	--kill-on-bad-exit=1 \
	--export=ALL \
	--input=none \
	--label \
	--mpi=pmix \
	/venv/bin/python -I -S "$toolkit_run"/entrypoint.pyz -- sh -c 'exec python train.py '"'"'sampling=c(4,2*7)'"'"' '"'"'it'"'"'"'"'"'"'"'"'s $HOME'"'"' '"'"''"'"' :'
toolkit_code=$?

for toolkit_python in /venv/bin/python python3; do
	if "$toolkit_python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then
		"$toolkit_python" -I -S "$toolkit_run"/entrypoint.pyz --finish "$toolkit_run" "$toolkit_code"
		toolkit_code=$?
		break
	fi
done
exit "$toolkit_code"
