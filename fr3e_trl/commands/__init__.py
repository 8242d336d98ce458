"""What the commands share, and the commands `fr3e train` and `fr3e eval`."""
