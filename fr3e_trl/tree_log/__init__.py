"""Trees that a run logs while it trains, and a page that shows them."""
