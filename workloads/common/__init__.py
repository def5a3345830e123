"""Parts that workloads share: ranks, the graph on disk, sampling, metrics."""
