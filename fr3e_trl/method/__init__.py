"""The method, a step a file: anchors, tree, advantages, batch, refill, metrics. Nothing here knows TRL or processes."""
