"""What Slurm is told and what it answers: srun argv, sbatch script, queue, probe."""
