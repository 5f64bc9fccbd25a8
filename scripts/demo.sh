#!/bin/sh
# The main job in small: simulate an Internet, set questions aside, prepare probe rows, train a small model, compare it
# and the completer that comes with the package with the classical predictors. Run it by `make demo`. What an earlier run has done is skipped, and what it was doing is continued.
set -eu
folder=$1
measurements=$2
steps=$3
bold='' plain=''
if [ -t 1 ]; then bold=$(printf '\033[1m') plain=$(printf '\033[0m'); fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
run() { say "\$ $*"; "$@"; }

raw=$folder/raw-$measurements
split=$folder/split-$measurements
rows=$folder/rows-$measurements
name=demo-$measurements-$steps
if [ ! -e "$raw/world.json" ]; then
    # A small Internet, so that a small model can learn it in a few minutes.
    run ping-llm simulate --measurements "$measurements" --output "$raw" --set ipv6_share=0 \
        --set measurements_per_source=400 --set regions=4 --set cities_per_region=6 --set systems_per_region=8
fi
if [ ! -e "$split/split.json" ]; then
    run ping-llm split "$raw" --output "$split"
fi
run ping-llm prepare --input "$split/train" --output "$rows" --train-ratio 0.95
run ping-llm inspect batches "$rows" --steps 0:3 --length 256 --batch-size 8
run ping-llm train --config configs/demo.yml --name "$name" --steps "$steps" \
    network_train_files="$rows" network_eval_files="$rows" base_output_directory="$folder/runs"
run ping-llm evaluate "$folder/runs/ping-llm/$name" completer --data "$split" --world "$raw" --questions 60 \
    --plots "$folder/plots-$measurements"
run ping-llm report "$folder/runs/ping-llm/$name"
say "Where everything is"
cat <<END
  $raw     measurements of the simulated Internet
  $split   training part and questions, kept apart
  $rows    probe rows
  $folder/plots-$measurements    errors, calibration, predicted against measured
  $folder/runs/ping-llm/$name    the run: report.html (open it in a browser), loss.png, metrics.jsonl, checkpoints, summary.json

  To ask in the browser:  .venv/bin/ping-llm serve --checkpoint $folder/runs/ping-llm/$name --rows $rows
END
