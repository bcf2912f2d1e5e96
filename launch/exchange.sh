#!/usr/bin/env bash
# The MoE exchange over GPUs of several hosts with mpirun, checked and timed; docs/infiniband.md explains its lines.
#   launch/exchange.sh node1:8,node2:8 [OPTIONS of benchmarks.exchange_nodes]
# The repository and the Python environment are in the same place on every host. LD_PRELOAD and NVSHMEM_*, ROSE_* and
# UCX_* variables are passed on. One host: launch/exchange.sh localhost:2 --force-remote 1
set -euo pipefail
if [ $# -lt 1 ]; then
  echo "usage: $0 HOST:RANKS,… [OPTIONS]" >&2
  exit 2
fi
hosts=$1
shift
ranks=0
for host in ${hosts//,/ }; do
  [[ $host == *:* ]] || { echo "$0: '$host' is not HOST:RANKS" >&2; exit 2; }
  ranks=$((ranks + ${host##*:}))
done
variables=$(python -c 'from rose_dist.comm.mpi_environment import mpi_environment
print(*(f"{key}={value}" for key, value in mpi_environment({}).items()), sep="\n")')
while IFS='=' read -r key value; do
  [ -v "$key" ] || export "$key=$value"
done <<<"$variables"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
passed=(-x PYTHONPATH -x PATH)
for name in $(compgen -e | grep -E '^((NVSHMEM|ROSE|UCX)_|LD_PRELOAD$)' || true); do passed+=(-x "$name"); done
exec mpirun -n "$ranks" --host "$hosts" --bind-to none "${passed[@]}" python -m benchmarks.exchange_nodes "$@"
