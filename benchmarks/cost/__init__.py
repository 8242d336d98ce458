"""What a step costs, and FR3E's own bookkeeping."""
