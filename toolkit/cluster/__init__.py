"""What a machine and a cluster can do."""
