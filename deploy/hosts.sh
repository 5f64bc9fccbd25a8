#!/bin/bash
# Training on several hosts without a scheduler: one process on each, started by ssh.
#
#     deploy/hosts.sh node1 node2 node3 -- --config configs/latency_network.yml --name my-run --steps 100000
#
# What follows -- is given to `ping-llm train`. All hosts need this folder under the same name, with the run's folder on a
# disk that they share; ssh without a password; ping-llm on the PATH, or PING_LLM=/path/of/ping-llm. `localhost` is started
# without ssh: `deploy/hosts.sh localhost localhost -- …` tries it on one machine. The same command resumes a run, on
# these or other hosts. Ctrl-C saves and ends on all of them.
#
# The first host is process 0; it listens on PING_LLM_PORT (default 29400). All that is set for a process is
# JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID: any other launcher can do the same.
set -u
hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    hosts+=("$1")
    shift
done
if [ ${#hosts[@]} -eq 0 ] || [ $# -lt 2 ]; then
    echo "usage: $0 HOST [HOST…] -- OPTIONS OF ping-llm train" >&2
    exit 2
fi
shift
program=${PING_LLM:-ping-llm}
printf -v options ' %q' "$@"

started=()
stop() { kill -s "$1" "${started[@]}" 2>/dev/null; }
for number in "${!hosts[@]}"; do
    variables="JAX_COORDINATOR_ADDRESS=${hosts[0]}:${PING_LLM_PORT:-29400} JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$number"
    command="exec env $variables $program train$options distributed=true"
    if [ "${hosts[$number]}" = localhost ]; then
        bash -c "$command" < /dev/null &
    else
        # -tt: when ssh is ended here, the process is ended there
        ssh -tt -o BatchMode=yes "${hosts[$number]}" "cd $(printf %q "$PWD") && $command" < /dev/null &
    fi
    started+=($!)
done
trap 'stop TERM' TERM INT

worst=0
for number in "${!hosts[@]}"; do
    while :; do
        wait "${started[$number]}"
        code=$?
        kill -0 "${started[$number]}" 2>/dev/null || break  # otherwise the trap ended the waiting
    done
    [ $code -gt $worst ] && worst=$code
done
exit $worst
