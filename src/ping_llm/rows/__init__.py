"""Probe rows: one history of one source per record, prepared once, read at random."""
