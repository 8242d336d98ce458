"""Whether training works on this machine, line by line: `fr3e check`."""
