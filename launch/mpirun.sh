#!/usr/bin/env bash
# Starts a rose command on the ranks of this host with mpirun alone:
#   launch/mpirun.sh 2 serve MODEL --dp 2 --ep 2
# `rose launch` does the same, drains on SIGTERM and starts other hosts; `rose launch --print` shows its command.
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "usage: $0 RANKS ROSE_COMMAND…" >&2
  exit 2
fi
ranks=$1
shift
variables=$(python -c 'from rose_dist.comm.mpi_environment import mpi_environment
print(*(f"{key}={value}" for key, value in mpi_environment({}).items()), sep="\n")')
while IFS='=' read -r key value; do
  [ -v "$key" ] || export "$key=$value"
done <<<"$variables"
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
exec mpirun -n "$ranks" --bind-to none --map-by :OVERSUBSCRIBE python -m rose_dist "$@"
