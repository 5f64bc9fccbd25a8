"""What `ping-llm bench` measures. Every figure in docs/benchmarks.md comes from here."""
