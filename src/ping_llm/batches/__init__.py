"""From probe rows to batches: `batch = f(rows, seed, step, batch size, length)` and nothing else.

randomness   numbers that depend on their key alone, and random permutations that need no memory
contexts     which measurements of a row, with or without times, in which order
plan         which contexts share a sequence
batch        sequences to arrays
"""
