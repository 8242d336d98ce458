"""The laboratory: comparisons of FR3E with GRPO, what a step costs, and their results. Not part of the package."""
