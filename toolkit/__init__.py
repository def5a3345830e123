"""PyTorch + PyG training from a workstation to a Slurm cluster with pyxis and enroot.

This file travels inside ``entrypoint.pyz`` and is imported by whatever Python 3.8+ an image has,
so it stays as small and as old-Python-clean as :mod:`toolkit.entrypoint`.
"""

__version__ = "0.1.0"
