"""The completer: a prior-fitted network (PFN) that completes a latency matrix by in-context learning.

It reads measurements as context and answers for pairs and moments that were not measured: the task of matrix completion
and of network coordinates, without fitting anything and without having seen the addresses before.

network     the set transformer, on NumPy and on JAX arrays alike, and its output: a mixture of bins and of kernels
            around RTTs copied from the context
model       the same as a Flax module: initial weights, the loss, and prediction on an accelerator (a CPU needs no JAX)
inference   contexts of real questions, and their answers
"""
