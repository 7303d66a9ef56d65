#!/usr/bin/env bash
# Through torchx (pip install torchx), on Slurm; -s local_cwd runs the same on this machine.
#     bash launch/torchx.sh strategy=fsdp2 precision=bf16
set -euo pipefail
torchx run -s "${SCHEDULER:-slurm}" -cfg "${CFG:-partition=main}" dist.ddp -j "${NODES:-2}x${NPROC:-8}" -m distbench -- "$@"
