"""distbench: choose between DDP, FSDP and their settings by experiment.

Importing this package must stay cheap (no torch): `python -m distbench --help` and every refused config rest on it.
"""

__version__ = "0.1.0"
