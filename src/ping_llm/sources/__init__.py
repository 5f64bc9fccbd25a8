"""Where measurements come from: files that people have, RIPE Atlas, a simulated Internet."""

WORLD_FILE = "world.json"  # what the simulator leaves beside its measurements; it is JSON, but not of measurements
ROWS_FILE = "manifest.json"  # the same of prepared rows
SPLIT_FILE = "split.json"  # what tells that a folder is a split: beside what may be learned from it holds the queries
NODES_FILE = "nodes.csv"  # names and their addresses: beside measurements as a user has them, and beside prepared rows
