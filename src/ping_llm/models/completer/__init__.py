"""The completer: a prior-fitted network (PFN) that completes a latency matrix by in-context learning.

It reads measurements as context and answers for pairs and moments that were not measured: the task of matrix completion
and of network coordinates, without fitting anything and without having seen the addresses before.

network     the set transformer, on NumPy and on JAX arrays alike, and what it outputs: a mixture of bins and of kernels
            copied from the context
model       the same as a Flax module, for training: first weights, and the loss
inference   contexts of real questions, and their answers
compiled    how an accelerator runs the network; a CPU needs no JAX
"""
