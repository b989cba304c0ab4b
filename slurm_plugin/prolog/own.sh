# Whether nobody but root and this user has a hand in $run and what is made in it: no link, nothing of a stranger's or open
# to others, nor a directory above in which they could put something in its place. What is missing is made by the Prolog.
is_own() {
  for directory in "$run" "$run/grants" "$run/environment"; do
    if [ ! -e "$directory" ] && [ ! -L "$directory" ]; then continue; fi
    [ "$(of_us "$directory" ! -perm /022)" ] || return 1
  done
  [ "$(of_us "${run%/*}/." \( ! -perm /022 -o -perm -1000 \))" ] || [ ! -e "${run%/*}" ]
}

# Prints $1 if it is a directory of root's or of this user's for which the tests of find hold that follow.
of_us() {
  place=$1
  shift
  PATH=/usr/sbin:/usr/bin:/sbin:/bin find "$place" -maxdepth 0 -type d \( -user 0 -o -user "$(id -u)" \) "$@" 2>/dev/null
}
