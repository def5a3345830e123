"""Where a job runs: ``local``, ``slurm`` and ``docker``, each with the same few functions."""
