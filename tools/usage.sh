# Sourced by the scripts of this folder.

answer_help() { # ARGS ...: print the comment that the script begins with, if that is asked for
    case ${1:-} in -h | --help)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
        exit
        ;;
    esac
}

at_most() { # NUMBER ARGS ...: end at an option, and at an argument beyond so many
    local most=$1 number argument
    shift
    answer_help "$@"
    for ((number = 1; number <= $#; number++)); do
        argument=${!number}
        if [[ $number -gt $most || $argument = -* ]]; then
            echo "tools/${0##*/}: unknown argument '$argument'; tools/${0##*/} --help says what there is" >&2
            exit 2
        fi
    done
}
