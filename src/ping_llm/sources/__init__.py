"""Where measurements come from: files that people have, RIPE Atlas, a simulated Internet."""

WORLD_FILE = "world.json"
"""What the simulator leaves beside its measurements; it is JSON, but not of measurements."""
