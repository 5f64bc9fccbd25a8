#!/bin/sh
# The main job in small: simulate an Internet, prepare probe rows, look at rows and batches. Run it by `make demo`.
# Each step is skipped or continued if an earlier run has done it already.
set -eu
folder=$1
measurements=$2
bold='' plain=''
if [ -t 1 ]; then bold=$(printf '\033[1m') plain=$(printf '\033[0m'); fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
run() { say "\$ $*"; "$@"; }

if [ ! -e "$folder/raw-$measurements/world.json" ]; then
    run ping-llm simulate --measurements "$measurements" --output "$folder/raw-$measurements"
fi
run ping-llm prepare --input "$folder/raw-$measurements/*.parquet" --output "$folder/rows-$measurements"
run ping-llm inspect rows "$folder/rows-$measurements"
run ping-llm inspect batches "$folder/rows-$measurements" --steps 0:3
say "Measurements are in $folder/raw-$measurements, probe rows in $folder/rows-$measurements."
