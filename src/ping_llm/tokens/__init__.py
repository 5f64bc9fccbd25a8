"""Measurements as tokens: vocabulary, vectorised encoder, decoder."""
