"""Credit: what a token learns from. Each rule is one file."""
