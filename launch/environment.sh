#!/bin/bash
# A run over hosts that have nothing but ssh, or any scheduler that numbers its processes: the same
# on each host, with its own number.
#
#     launch/environment.sh HOST0:PORT PROCESSES NUMBER gpt-1.7b --data.path /data/text \
#         --data.tokenizer /data/tokenizer.json --out /shared/run
#
# HOST0 is an address of the host with NUMBER 0 at which the others reach it; PORT is free there, and
# nothing but it listens for the run's control. `torchrun --nproc-per-node 8 ... -m mtx train` needs no script.

set -u
export JAX_COORDINATOR_ADDRESS=$1 JAX_NUM_PROCESSES=$2 JAX_PROCESS_ID=$3
shift 3
exec ${MTX:-mtx} train "$@"
