#!/bin/bash
# A run under Open MPI that goes on from its newest checkpoint after a failure.
#
#     OUT=/shared/run launch/openmpi.sh -n 4 --map-by ppr:1:node -- gpt-1.7b --data.path /data/text --data.tokenizer /data/tokenizer.json
#
# Before -- stand options of mpirun (-n, --hostfile ...), after it those of
# `mtx train`. Open MPI 4 says where process 0 runs; for Open MPI 5, or to choose the interface, set
# COORDINATOR=host:port, a free port of the first host.

set -u
: "${OUT:?set OUT to the directory of the run}"
MTX=${MTX:-mtx}
RESTARTS=${RESTARTS:-10}

mpi=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do mpi+=("$1"); shift; done
[ $# -gt 0 ] && shift
[ -n "${COORDINATOR:-}" ] && mpi+=(-x "JAX_COORDINATOR_ADDRESS=$COORDINATOR")

asked=
# mpirun would kill its processes a moment after SIGTERM: they are asked first, and end by themselves.
stop() { asked=yes; [ -n "${mpirun:-}" ] && pkill -TERM --parent "$mpirun"; }
trap stop TERM INT

for ((failures = 0; failures <= RESTARTS; failures++)); do
    mpirun "${mpi[@]}" $MTX train "$@" --out "$OUT" &
    mpirun=$!
    wait "$mpirun"
    status=$?
    while kill -0 "$mpirun" 2>/dev/null; do wait "$mpirun"; status=$?; done  # a trap ends wait, too
    case $status in 0 | 2 | 75) exit "$status" ;; esac
    [ -n "$asked" ] && exit 75
    echo "launch: mpirun ended with exit status $status; again in $((failures * 5 + 5)) s" >&2
    sleep $((failures * 5 + 5)) & wait $!
done
echo "launch: gives up" >&2
exit 79
