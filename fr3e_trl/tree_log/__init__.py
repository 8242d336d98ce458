"""Logs of trees during training, and a page that shows them."""
