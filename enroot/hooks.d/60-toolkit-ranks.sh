#!/usr/bin/env bash
# Installed by toolkit: rank variables for every container of a Slurm step.
#
# enroot runs this once a container, so once a node; what differs from task to task (RANK, LOCAL_RANK)
# pyxis sets, but only where PYTORCH_VERSION is set, be it to nothing. WORLD_SIZE, LOCAL_WORLD_SIZE and
# NODE_RANK are the step's, whatever the image, the job or another hook says. A MASTER_ADDR or
# MASTER_PORT that is there already is kept, unless it is loopback in a step of several nodes.
# A hook that fails stops the container, so where the step does not add up this one does nothing.
set -euo pipefail

# Not in a batch script (its step ids are above 4294967280), nor where a step may span two jobs.
[[ ${SLURM_STEP_ID-} =~ ^[0-9]{1,10}$ && ${SLURM_NODEID-} =~ ^[0-9]+$ && ${SLURM_JOB_ID-} =~ ^[0-9]+$ ]] || exit 0
[[ $SLURM_STEP_ID -lt 4294967280 && -z ${SLURM_HET_SIZE-} ]] || exit 0

# Tasks of each node, from "4(x2),3".
layout=()
IFS=, read -ra groups <<<"${SLURM_STEP_TASKS_PER_NODE-}"
for group in "${groups[@]}"; do
	[[ $group =~ ^([0-9]+)(\(x([0-9]{1,6})\))?$ ]] || exit 0
	for ((i = 0; i < ${BASH_REMATCH[3]:-1}; i++)); do layout+=("${BASH_REMATCH[1]}"); done
done
world=0
for tasks in "${layout[@]}"; do world=$((world + tasks)); done
[[ $world -eq ${SLURM_STEP_NUM_TASKS:-0} && $SLURM_NODEID -lt ${#layout[@]} ]] || exit 0

# The first name of the step's nodes: the first number of each bracket, then all before a comma.
first=${SLURM_STEP_NODELIST-}
while [[ $first =~ ^([^,[]*)\[([^],-]+)[^]]*\](.*)$ ]]; do
	first=${BASH_REMATCH[1]}${BASH_REMATCH[2]}${BASH_REMATCH[3]}
done
first=${first%%,*}
[[ -n $first ]] || exit 0

# What the image or a hook before this one set last, else the job.
current() {
	local line
	line=$(grep "^$1=" "$ENROOT_ENVIRON" | tail -n 1) || true
	printf '%s' "${line:+${line#*=}}" | grep . || printf '%s' "${!1-}"
}
put() {
	sed -i "/^$1=/d" "$ENROOT_ENVIRON"
	printf '%s=%s\n' "$1" "$2" >>"$ENROOT_ENVIRON"
}

put WORLD_SIZE "$world"
put LOCAL_WORLD_SIZE "${layout[SLURM_NODEID]}"
put NODE_RANK "$SLURM_NODEID"
address=$(current MASTER_ADDR)
if [[ ${#layout[@]} -eq 1 ]]; then
	first=127.0.0.1
elif [[ $address =~ ^(localhost.*|127\..*|::1|0\.0\.0\.0)$ ]]; then
	address=
fi
put MASTER_ADDR "${address:-$first}"
port=$(current MASTER_PORT)
# Differs between jobs and between steps of a job; the toolkit's entrypoint chooses the same.
put MASTER_PORT "${port:-$((10000 + (SLURM_JOB_ID * 151 + SLURM_STEP_ID) % 22751))}"
grep -q '^PYTORCH_VERSION=' "$ENROOT_ENVIRON" || put PYTORCH_VERSION "${PYTORCH_VERSION-}"
