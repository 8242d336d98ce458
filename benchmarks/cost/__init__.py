"""What FR3E costs: of a step, of its own bookkeeping, of several processes, of a vLLM server."""
