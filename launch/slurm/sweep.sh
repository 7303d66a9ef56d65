#!/usr/bin/env bash
# A sweep whose cells are jobs of Slurm's, two nodes each. Run it where sbatch works: it submits, waits, and prints the table.
# Needs: pip install 'distbench[slurm]', a folder that all nodes share, sacct (accounting).
# Left alone, a lost connection ends the waiting, not the jobs: the same command with sweep.resume=true goes on.
set -euo pipefail
python -m distbench -m hydra/launcher=distbench_slurm \
    launch.nodes=2 launch.nproc=8 +launch.slurm.partition="${PARTITION:?}" launch.slurm.gpus_per_node=8 \
    strategy=ddp,fsdp,fsdp2 precision=bf16 checkpoint.every=500 sweep.resume=true "$@"
