# Slurm runs it as root on each node of a job, when all processes of the job have ended. It removes what the Prolog wrote, so
# that no later process can call itself one of this job. It always exits with 0: Slurm drains a node whose Epilog fails.

PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH

case ${SLURM_JOB_ID:-} in
  '' | *[!0-9]*) ;;
  *)
    # In this order: by the first file a Prolog that writes the second one anew sees whether the job has ended.
    if is_own; then
      for file in "$run/environment/$SLURM_JOB_ID" "$run/grants/$SLURM_JOB_ID.json"; do rm -f "$file" "$file.new"; done
    fi
    ;;
esac
exit 0
