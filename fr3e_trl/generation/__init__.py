"""How completions are drawn: one interface, and the backends behind it."""
