"""ping-llm: a language model of the Internet, learnt from latency measurements."""

__version__ = "0.1.0"
