"""The one folder that knows private names of TRL, accelerate and transformers."""
