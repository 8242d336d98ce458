"""Trees of a run, logged while it trains, and a page that shows them."""
