#!/bin/bash
# Modal from data to model, step by step. What each does is one command of Modal's, which is shown. docs/modal.md
#
#     scripts/modal.sh upload data/raw                 measurements onto the data volume, as raw
#     scripts/modal.sh prepare                         raw -> rows, there
#     scripts/modal.sh train my-run --steps 5000 …     train, detached: it continues when this machine is switched off
#     scripts/modal.sh logs ap-…                       what the detached run writes; without its number: which there are
#     scripts/modal.sh download my-run [PROJECT]       the run's folder, to runs/PROJECT/my-run
set -eu
run() {
    printf '$' >&2
    printf ' %q' "$@" >&2
    printf '\n' >&2
    "$@"
}
usage() {
    sed -n '4,8s/^#     //p' "$0" >&2
    exit 2
}
command -v modal > /dev/null || {
    echo 'error: the command modal is missing: pip install "ping-llm[modal]", then: modal setup' >&2
    exit 1
}
action=${1:-}
[ $# -gt 0 ] && shift
case $action in
    upload)
        [ $# -eq 1 ] || usage
        run modal volume create ping-llm-data 2> /dev/null || true # it may be there
        run modal volume put --force ping-llm-data "$1" raw
        ;;
    prepare) run modal run -m ping_llm.integrations.modal::prepare "$@" ;;
    train)
        [ $# -ge 1 ] || usage
        name=$1
        shift
        run modal run --detach -m ping_llm.integrations.modal::run --run-name "$name" "$@"
        ;;
    logs)
        if [ $# -eq 1 ]; then run modal app logs --follow "$1"; else run modal app list; fi
        ;;
    download)
        [ $# -ge 1 ] || usage
        project=${2:-ping-llm}
        mkdir -p "runs/$project"
        run modal volume get ping-llm-runs "$project/$1" "runs/$project/"
        ;;
    *) usage ;;
esac
