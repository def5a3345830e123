#!/usr/bin/env bash
# Start munged for one host of the Slurm test bed: slurm-munged.sh BED HOST
#
# Each host has its own, as on a cluster: munged refuses a credential that it has decoded before, and
# srun sends one credential to both nodes.
set -euo pipefail
bed=$1 name=$2
mkdir -p /run/toolkit-testbed-slurm
munged --key-file="$bed/etc/munge.key" --socket=/run/toolkit-testbed-slurm/munge.socket \
	--pid-file=/run/toolkit-testbed-slurm/munged.pid --seed-file="$bed/$name/munged.seed" \
	--log-file="$bed/log/munged.$name.log"
