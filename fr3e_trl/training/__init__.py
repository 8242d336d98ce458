"""What connects the method with TRL, and with other processes."""
