"""DDP workloads and their data; each also runs as ``python -m workloads.NAME``."""
