"""The completer: a prior-fitted network (PFN) that completes a latency matrix by in-context learning.

It reads measurements as context and answers for pairs and moments that were not measured: the task of matrix completion
and of network coordinates, without fitting anything and without having seen the addresses before.

model       the set transformer, and what it outputs: a mixture of bins and of kernels copied from the context
inference   contexts of real questions, and their answers
"""
