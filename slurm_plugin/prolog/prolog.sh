# Slurm runs it as root on each node of a job, before the job begins (PrologFlags=Alloc). It writes down which of the
# node's GPUs the job may use, and as what: RUN/grants/JOB.json for `hetstream internal coordinator --grants RUN/grants`, and
# RUN/environment/JOB for the TaskProlog.
#
# It always exits with 0, because Slurm drains a node whose Prolog fails. An opportunistic job for which anything is wrong
# gets no grant, so its processes end when they ask for the GPU. A guaranteed job runs in any case; when its grant cannot be
# written, RUN/grants is moved away, and then nobody shares a GPU of this node until an administrator has looked.
#
# A Comment with the packer's mark counts in an opportunistic partition alone, and GPUs of Slurm's count in no such one:
# whoever got round the guard, or came while it was not in place, has neither.
#
# Jobs of the packer's own user get no grant: one keeps a GPU for another job, one makes another job guaranteed
# (slurm_plugin/packing/quota_packer.py). Slurm says whose a job is; whoever else writes such a Comment has an ordinary job.

set -fu
umask 022
PATH=/usr/sbin:/usr/bin:/sbin:/bin
LC_ALL=C
export PATH LC_ALL

say() {
  timeout 2 logger -t hetstream-prolog -- "job ${SLURM_JOB_ID:-without a number}: $1" 2>/dev/null
}

# The coordinator's name for GPU number $1: by the site's list, or by NVIDIA's driver.
name_of() {
  for pair in ${HETSTREAM_GPUS:-}; do
    if [ "${pair%%=*}" = "$1" ]; then
      echo "${pair#*=}"
      return
    fi
  done
  set +f
  for file in "$driver"/*/information; do
    if [ "$(sed -n 's/^Device Minor:[[:space:]]*//p' "$file" 2>/dev/null)" = "$1" ]; then
      sed -n 's/^GPU UUID:[[:space:]]*//p' "$file"
    fi
  done
  set -f
}

# Write a file whole or not at all.
put() {
  cat >"$1.new" && mv -f "$1.new" "$1"
}

is_listed() {
  case $1 in '' | *' '*) return 1 ;; esac
  case " $2 " in *" $1 "*) return 0 ;; *) return 1 ;; esac
}

# The numbers $1 (with commas) as quoted names of GPUs, with commas and spaces.
quoted_names() {
  quoted=
  for number in $(printf %s "$1" | tr , ' '); do
    name=$(name_of "$number")
    case $name in '' | *[!A-Za-z0-9_./:-]*)
      say "GPU $number has no name here"
      return 1
      ;;
    esac
    quoted="${quoted:+$quoted, }\"$name\""
  done
  printf %s "$quoted"
}

# Make job J guaranteed on the GPUs that it has, from "J:NUMBERS@SECONDS": not later than that time, and on no others,
# since it may be another start of the job by then. Its processes go on; the coordinator tells them.
upgrade() (
  other=${1%%:*} spot=${1#*:}
  numbers=${spot%%@*} until_s=${spot#*@}
  for number in "$other" "$until_s"; do
    case $number in '' | *[!0-9]*) return 1 ;; esac
  done
  case $numbers in '' | *[!0-9,]*) return 1 ;; esac
  if [ "$(date +%s)" -gt "$until_s" ]; then
    say "job $other is not upgraded: that was to be done before $until_s"
    return 1
  fi
  file=$run/grants/$other.json given=$run/environment/$other
  quoted=$(quoted_names "$numbers") || return 1
  grant=$(cat "$file" 2>/dev/null)
  case $grant in
    *'"job_class": "opportunistic", "gpus": ['"$quoted]}") ;;
    *'"job_class": "guaranteed", "gpus": ['"$quoted]}") return 0 ;;
    *)
      say "job $other is not upgraded: it has no grant for GPU $numbers here"
      return 1
      ;;
  esac
  printf '%s\n' "$grant" | sed 's/"job_class": "opportunistic"/"job_class": "guaranteed"/' | put "$file"
  # The Epilog removes first what is the TaskProlog's: without it, the job has ended meanwhile.
  [ -e "$given" ] || rm -f "$file"
)

# Write down a job of class $1 with the GPUs $2 (numbers with commas). Its exit code says whether that was possible.
write_grant() (
  case $2 in '' | *[!0-9,]*)
    say "GPUs '$(printf %s "$2" | tr -cd 0-9A-Za-z,:.-)' are no list of numbers"
    return 1
    ;;
  esac
  quoted=$(quoted_names "$2") || return 1
  if [ -z "$quoted" ]; then return 1; fi
  names=$(printf %s "$quoted" | tr -d '" ') uuids=
  for name in $(printf %s "$names" | tr , ' '); do
    case $name in GPU-* | MIG-*) uuids=${uuids:+$uuids,}$name ;; esac
  done
  mkdir -p "$run/grants" "$run/environment" || return 1
  environment "$1" "$names" "${uuids:-$2}" "$2" | put "$run/environment/$job" || return 1
  printf '{"uid": %s, "job_class": "%s", "gpus": [%s]}\n' "$uid" "$1" "$quoted" | put "$run/grants/$job.json" || return 1
)

# A variable, and for which job it has this value: sbatch hands on the whole environment of the job that it is called in
# (hetstream/base/process.py).
of_job() {
  echo "$1=$2"
  echo "$1_OF_JOB=$job $2"
}

# What the TaskProlog hands on: the GPUs $2 (names) and $4 (numbers). The agent of each process takes its own of them.
environment() {
  if [ "$1" = opportunistic ]; then
    echo "CUDA_VISIBLE_DEVICES=$3"
  elif ! is_listed "${SLURM_JOB_PARTITION:-}" "${HETSTREAM_SHARED_PARTITIONS:-}"; then
    return
  fi
  of_job HETSTREAM_GPU "$2"
  case $2 in *,*) of_job HETSTREAM_GPU_NUMBERS "$4" ;; esac
  of_job HETSTREAM_JOB_CLASS "$1"
  if [ -n "${HETSTREAM_GPU_SOCKET:-}" ]; then of_job HETSTREAM_GPU_SOCKET "$HETSTREAM_GPU_SOCKET"; fi
}

allocate() (
  job=${SLURM_JOB_ID:-} uid=${SLURM_JOB_UID:-}
  case $job in '' | *[!0-9]*) return 1 ;; esac
  case $uid in '' | *[!0-9]*) return 1 ;; esac
  gpus=${SLURM_JOB_GPUS:-} comment=${SLURM_JOB_COMMENT:-}
  case $comment in "$mark"* | "$holds"* | "$upgrades"*) ;; *) if [ -z "$gpus" ]; then return 0; fi ;; esac
  if ! is_own; then
    say "no grant: $run is not root's alone: nothing is written there. See: ls -ld $run $run/*"
    return
  fi
  if [ -e "$run/grants-incomplete" ]; then
    say "no grant: $run/grants-incomplete is there, see the log of earlier jobs. Remove it when no job runs here"
    return
  fi
  readable=yes
  if [ -e "$settings" ]; then
    # An error in it would end this shell, so it is tried in one of its own.
    if (. "$settings"); then . "$settings"; else readable= && say "$settings cannot be read"; fi
  fi
  if [ "$readable" ] && { [ "$uid" = 0 ] || [ "$uid" = "${HETSTREAM_PACKER_UID:-0}" ]; }; then
    case $comment in
      "$holds"*) return ;;
      "$upgrades"*)
        upgrade "${comment#"$upgrades"}"
        return
        ;;
    esac
  fi
  class=guaranteed
  if is_listed "${SLURM_JOB_PARTITION:-}" "${HETSTREAM_OPPORTUNISTIC_PARTITIONS:-}"; then class=opportunistic; fi
  if [ -n "$gpus" ] && [ "$readable" ] && [ $class = opportunistic ]; then
    say "no grant: it has GPUs of its own in partition $SLURM_JOB_PARTITION, where the packer chooses them"
    rm -f "$run/grants/$job.json" "$run/environment/$job"
    return
  fi
  if [ -n "$gpus" ]; then
    [ "$readable" ] && write_grant guaranteed "$gpus" && return
    say "this job's GPUs cannot be written down: nobody shares a GPU of this node. See $run/grants-incomplete"
    mkdir -p "$run/grants" && mv "$run/grants" "$run/grants-incomplete"
    return
  fi
  case $comment in "$mark"*) ;; *) return ;; esac
  comment=${comment#"$mark"}
  if [ $class = guaranteed ]; then
    say "no grant: its Comment names GPUs, and partition ${SLURM_JOB_PARTITION:-without a name} is no opportunistic one"
  else
    [ "$readable" ] && write_grant opportunistic "${comment%% *}" && return
  fi
  rm -f "$run/grants/$job.json" "$run/environment/$job"
)

allocate
exit 0
