"""The completer: a prior-fitted network (PFN) that completes a latency matrix by in-context learning.

It reads measurements as context and answers for pairs and moments that were not measured: the task of matrix completion
and of network coordinates, without fitting anything and without having seen the addresses before.

model       the set transformer: features of measurements and nodes, attention to the context, output heads
mixture     what it outputs: a mixture of bins and of kernels copied from the context; as distribution, and as loss
inference   contexts of real questions, and their answers
"""
