"""What `fr3e` runs: train, eval, check, init and tree, and what these share."""
