"""The bench: FR3E and GRPO compared at equal cost."""
