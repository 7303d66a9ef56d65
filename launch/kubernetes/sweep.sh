#!/usr/bin/env bash
# A sweep, one run after another: each is a JobSet of its own, tried again or given up as jobset.yaml says.
# Needs: kubectl 1.31 or newer, and what jobset.yaml needs. Given again it goes on: what has ended stays as it is.
#     bash launch/kubernetes/sweep.sh
#     kubectl get jobsets                     how each ended
#     python -m distbench rank outputs        which one, why not the others: where the volume is to be seen
# Another setting to sweep over: a loop more, a line more in jobset.yaml's args, an expression more for sed.
set -euo pipefail
cd "$(dirname "$0")"
for strategy in ddp fsdp fsdp2; do
    job=distbench-$strategy
    sed -e "s/^  name: distbench\$/  name: $job/" -e "s/- strategy=.*/- strategy=$strategy/" jobset.yaml |
        kubectl apply -f -
    kubectl wait "jobset/$job" --for=jsonpath='{.status.terminalState}' --timeout=24h
done
