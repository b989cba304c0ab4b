# Slurm runs it as the user, before the batch script and each task; what it prints changes their environment. It hands on what
# the Prolog wrote for this job. A job of an opportunistic partition for which the Prolog wrote nothing sees no GPU. Its batch
# script waits before: the packer takes back what it did not place, and a program that missed its GPU would have failed by then.
#
# A job that asked for GPUs, and then started as an opportunistic one, has none in Slurm's books. Its steps would ask for
# them again, by what sbatch left in its environment, and be refused.

set -fu
asked="SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GPUS_PER_SOCKET SLURM_GPU_BIND SLURM_GPU_FREQ
  SLURM_MEM_PER_GPU SLURM_NTASKS_PER_GPU SLURM_TRES_PER_TASK SLURM_TRES_BIND SLURM_GRES"

task() (
  case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) return ;; esac
  given=$run/environment/$SLURM_JOB_ID
  if [ -r "$given" ] && is_own; then
    while read -r line; do
      echo "export $line"
      case $line in
        HETSTREAM_GPU=*) shared=yes ;;
        CUDA_VISIBLE_DEVICES=*)
          for name in $asked; do if printenv "$name" >/dev/null; then echo "unset $name"; fi; done
          ;;
      esac
    done <"$given"
    case ":${PYTHONPATH:-}:" in
      *":$startup:"*) ;;
      *) if [ "${shared:-}" ]; then echo "export PYTHONPATH=$startup${PYTHONPATH:+:$PYTHONPATH}"; fi ;;
    esac
    return
  fi
  if [ -n "${SLURM_JOB_GPUS:-}${SLURM_STEP_GPUS:-}" ]; then return; fi
  # Where nobody can say which partitions are opportunistic, any may be. An error in the file would end this shell.
  partitions=${SLURM_JOB_PARTITION:-} wait_s=0
  if [ ! -e "$settings" ]; then
    partitions=
  elif (. "$settings") 2>/dev/null; then
    . "$settings"
    partitions=${HETSTREAM_OPPORTUNISTIC_PARTITIONS:-} wait_s=${HETSTREAM_UNPLACED_S:-30}
  fi
  case " $partitions " in
    *" ${SLURM_JOB_PARTITION:-} "*)
      case ${SLURM_STEP_ID:-} in '' | -5 | 4294967291) sleep "$wait_s" ;; esac    # the batch script; 26.05 gives it a number
      echo "export CUDA_VISIBLE_DEVICES=NoDevFiles"
      ;;
  esac
)

task
exit 0
