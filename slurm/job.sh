# What the scripts of this folder share; sourced by them. docs/operations.md explains the variables.
#
#   ROSE_HOME          this repository's folder on every node; default: where sbatch was called
#   ROSE_PYTHON        interpreter with rose installed; default: ROSE_HOME/.venv/bin/python, else python3 on PATH
#   ROSE_LOGS          folder that every node sees; a folder a job in it; default: the folder where sbatch was called
#   ROSE_CONTAINER     image; unset runs on the nodes' own system
#   ROSE_CONTAINER_BY  pyxis or apptainer; default: pyxis where srun has it
#   ROSE_REPLICAS      serve by so many replicas, each on as many whole nodes
#   ROSE_MOUNTS        more folders for the container, HOST:INSIDE,…

fatal() {
  echo "FATAL: $*" >&2
  exit 1
}

[ -n "${SLURM_JOB_ID:-}" ] || fatal "submit this with sbatch, for example: sbatch -N 2 --ntasks-per-node=8 slurm/serve.sbatch MODEL"

export PYTHONPATH=$ROSE_HOME${PYTHONPATH:+:$PYTHONPATH}
if [ -z "${ROSE_PYTHON:-}" ]; then
  ROSE_PYTHON=$ROSE_HOME/.venv/bin/python
  [ -x "$ROSE_PYTHON" ] || ROSE_PYTHON=python3
fi

# One folder a job; an array's tasks are jobs of their own.
logs=${ROSE_LOGS:-$SLURM_SUBMIT_DIR}/rose-$SLURM_JOB_ID
mkdir -p "$logs"

# srun does not take --cpus-per-task from sbatch (since Slurm 22.05), and threads must not outnumber the cores.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SRUN_CPUS_PER_TASK}

# What a rank's guard runs when the first node is gone: Slurm itself notices that only after SlurmdTimeout.
export ROSE_END_JOB=${ROSE_END_JOB-scancel $SLURM_JOB_ID}

# One rank a GPU. With --gpus-per-node every rank sees all GPUs of its node and takes the one of its local rank; with
# --gpus-per-task each sees its own alone, as number 0, and NVLink needs --gpu-bind=none.
gpus_per_node=${SLURM_GPUS_PER_NODE:-}
gpus_per_node=${gpus_per_node##*:}
if [ -n "$gpus_per_node" ] && [ -z "${SLURM_GPUS_PER_TASK:-}" ] && [ -n "${SLURM_NTASKS_PER_NODE:-}" ] &&
  [ "$SLURM_NTASKS_PER_NODE" != "$gpus_per_node" ]; then
  fatal "one rank a GPU: --ntasks-per-node=$SLURM_NTASKS_PER_NODE does not fit --gpus-per-node=$gpus_per_node"
fi

step=(srun --kill-on-bad-exit=1 --unbuffered)
inside=()
if [ -n "${ROSE_CONTAINER:-}" ]; then
  by=${ROSE_CONTAINER_BY:-}
  if [ -z "$by" ]; then
    by=apptainer
    ! srun --help | grep -q -e --container-image || by=pyxis
  fi
  mounts=$ROSE_HOME:$ROSE_HOME,$logs:$logs${ROSE_MOUNTS:+,$ROSE_MOUNTS}
  case $by in
    pyxis)
      step+=(--container-image="$ROSE_CONTAINER" --container-mounts="$mounts" --no-container-mount-home) ;;
    apptainer)
      inside=(apptainer exec --bind "$mounts")
      [ -z "${SLURM_JOB_GPUS:-}${SLURM_GPUS_PER_NODE:-}${SLURM_GPUS_PER_TASK:-}" ] || inside+=(--nv)
      inside+=("$ROSE_CONTAINER") ;;
    *) fatal "ROSE_CONTAINER_BY is pyxis or apptainer, not $by" ;;
  esac
fi

# Stops the job, with a line a node, where the model can't be read.
check_model() {
  local model=$1
  [ -n "$model" ] || fatal "no model: give its folder as the script's first argument"
  # Every node is to be heard: a step that ends with its first failure may end before its message arrives.
  "${step[@]}" --kill-on-bad-exit=0 --mpi=none --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "${inside[@]}" sh -c '
    [ -r "$1/config.json" ] || { echo "FATAL: $(hostname) has no model in $1 (no config.json there)" >&2; exit 1; }
    ls "$1"/*.safetensors >/dev/null 2>&1 || { echo "FATAL: $(hostname) has no weights in $1" >&2; exit 1; }
  ' sh "$model" || fatal "the model has to be in $model on every node"
}

# Runs `python ARGUMENTS` as the job's ranks and returns its exit code. Slurm signals the ranks itself; this shell only has
# to wait for them. srun would wait, after the ranks of this node, for nodes that are gone: not for long here.
run_ranks() {
  local code=0 ended=$logs/rank-0-ended srun
  rm -f "$ended"
  trap 'echo "stopping: the ranks finish what runs"' TERM INT USR1
  ROSE_ENDED=$ended "${step[@]}" --mpi=pmix --task-epilog="$ROSE_HOME/slurm/task_ended.sh" \
    "${inside[@]}" "$ROSE_PYTHON" "$@" <&0 & # without <&0 it would read /dev/null
  srun=$!
  (
    trap '' TERM INT USR1
    until [ -e "$ended" ]; do sleep 0.5; done
    for _ in {1..14}; do sleep 0.5; done # no sleep outlives this shell for long: the job would not end
    echo "rank 0 has ended, but srun waits for nodes that do not answer: giving them up" >&2
    kill -KILL $srun
  ) &
  local patience=$!
  wait $srun || code=$?
  while kill -0 $srun 2>/dev/null; do # a trapped signal ends `wait` before its time
    code=0
    wait $srun || code=$?
  done
  { kill -KILL $patience; wait $patience; } 2>/dev/null || true # without a word from bash
  rm -f "$ended"
  return $code
}

# Serves by ROSE_REPLICAS steps of this job: `rose launch`, on this node, starts them, and each again when it is lost.
run_replicas() {
  local code=0 launch ranks=${SLURM_NTASKS:-$((SLURM_JOB_NUM_NODES * ${SLURM_NTASKS_PER_NODE:-1}))}
  [ ${#inside[@]} = 0 ] || fatal "replicas in containers need pyxis, not apptainer"
  [ $((SLURM_JOB_NUM_NODES % ROSE_REPLICAS)) = 0 ] ||
    fatal "$ROSE_REPLICAS replicas on whole nodes: $SLURM_JOB_NUM_NODES nodes can't be shared out"
  export ROSE_END_JOB= # the end of a replica is not the job's
  trap 'kill -TERM $launch' TERM INT USR1
  "$ROSE_PYTHON" -m rose_dist launch --replicas "$ROSE_REPLICAS" -n $((ranks / ROSE_REPLICAS)) --by srun \
    --srun-options "$(printf "%q " "${step[@]:3}")" --drain-timeout "${ROSE_DRAIN_SECONDS:-20}" -- "$@" &
  launch=$!
  wait $launch || code=$?
  while kill -0 $launch 2>/dev/null; do # a trapped signal ends `wait` before its time
    code=0
    wait $launch || code=$?
  done
  return $code
}
