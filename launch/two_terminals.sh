#!/usr/bin/env bash
# One run on two machines by hand, no scheduler. In a terminal on each, the same folder, with which node it is:
#     bash launch/two_terminals.sh 0 FIRST_HOST strategy=fsdp2
#     bash launch/two_terminals.sh 1 FIRST_HOST strategy=fsdp2
# FIRST_HOST: name or address of node 0, as node 1 reaches it. Check first, on node 1: ping -c 1 FIRST_HOST.
set -euo pipefail
node=${1:?0 or 1} first=${2:?name of node 0} && shift 2
# Only where a host's name resolves to the wrong interface (check: ip route get FIRST_HOST):
#   export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
exec torchrun --nnodes=2 --node-rank="$node" --nproc-per-node="${NPROC:-2}" \
    --master-addr="$first" --master-port="${PORT:-29500}" -m distbench "$@"
