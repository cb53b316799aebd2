#!/usr/bin/env bash
# One run on the GPUs of one or many nodes under SLURM, over time limits and lost nodes.
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: launch/slurm.sh [options] CONFIG RUN_DIR [key=value ...]

Submits a job that runs `dpfl train CONFIG key=value ... --run-dir RUN_DIR` with one process per
GPU, on all nodes at once; SLURM tells them how to find each other. RUN_DIR must be on storage that
all nodes share, or in a bucket. Two minutes before its time limit (or its preemption) the job saves
a checkpoint at a step on which all processes agree, is requeued, and resumes. If a process is lost
the job ends on all nodes and is requeued too; it resumes from the last checkpoint.

  --nodes N            default 1
  --gpus-per-node G    default 8
  --cpus-per-gpu C     default 8
  --time T             time limit, default 24:00:00
  --partition P, --account A, --qos Q    as SLURM's
  --setup COMMAND      run on the first node before, e.g. 'source ~/venv/bin/activate'
  --container-image IMAGE, --container-mounts FROM:TO,...
                       run in a container, where SLURM has NVIDIA's pyxis (launch/Dockerfile makes
                       an image); RUN_DIR, CONFIG and the data must be mounted
  --restarts N         requeue at most N times, default 20
  --dry-run            print the batch script and stop

Exit status: that of sbatch; 2 bad input.
TEXT
}

nodes=1 gpus_per_node=8 cpus_per_gpu=8 time=24:00:00 partition='' account='' qos='' setup=''
container_image='' container_mounts='' restarts=20 dry_run=0
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --dry-run) dry_run=1; shift ;;
    --nodes | --gpus-per-node | --cpus-per-gpu | --time | --partition | --account | --qos | \
      --setup | --container-image | --container-mounts | --restarts)
      if [ $# -lt 2 ]; then echo "slurm: $1 needs a value" >&2; exit 2; fi
      name=${1#--}; printf -v "${name//-/_}" '%s' "$2"; shift 2 ;;
    --*) echo "slurm: unknown option $1 (see --help)" >&2; exit 2 ;;
    *) break ;;
  esac
done
if [ $# -lt 2 ]; then usage >&2; exit 2; fi
for number in "$nodes" "$gpus_per_node" "$cpus_per_gpu" "$restarts"; do
  case "$number" in '' | *[!0-9]*) echo "slurm: $number is no whole number" >&2; exit 2 ;; esac
done
# srun does not take the CPUs of a task from the job (SLURM 22.05 and later).
task=(--cpus-per-task="$cpus_per_gpu")
if [ -n "$container_image" ]; then task+=(--container-image="$container_image"); fi
if [ -n "$container_mounts" ]; then task+=(--container-mounts="$container_mounts"); fi
printf -v train '%q ' "${task[@]}" dpfl train "$1" "${@:3}" --run-dir "$2"
# Programs, for later starts: in a folder of our own, as they are run, and RUN_DIR may be sent.
printf -v compiled '%q' "${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/dpfl_jax/compiled}"

script() {
  cat <<TEXT
#!/usr/bin/env bash
#SBATCH --job-name=dpfl
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$gpus_per_node
#SBATCH --gpus-per-node=$gpus_per_node
#SBATCH --cpus-per-task=$cpus_per_gpu
#SBATCH --time=$time
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
TEXT
  if [ -n "$partition" ]; then echo "#SBATCH --partition=$partition"; fi
  if [ -n "$account" ]; then echo "#SBATCH --account=$account"; fi
  if [ -n "$qos" ]; then echo "#SBATCH --qos=$qos"; fi
  echo 'set -uo pipefail'
  echo "export JAX_COMPILATION_CACHE_DIR=$compiled"
  if [ -n "$setup" ]; then echo "$setup"; fi
  cat <<TEXT
srun --kill-on-bad-exit=1 --wait=60 --label $train
status=\$?
# 0 is the end, 2 bad input; anything else is an interruption, and the run can go on.
if [ "\$status" != 0 ] && [ "\$status" != 2 ] && [ "\${SLURM_RESTART_COUNT:-0}" -lt $restarts ]; then
  scontrol requeue "\$SLURM_JOB_ID"
fi
exit "\$status"
TEXT
}

if [ "$dry_run" = 1 ]; then script; exit 0; fi
script | sbatch
