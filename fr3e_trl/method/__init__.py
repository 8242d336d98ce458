"""The method, a step a file: anchors, tree, credit, rows, refill, metrics. Nothing here knows TRL or processes."""
