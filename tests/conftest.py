import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: no test may reach for the hub

from hypothesis import settings

settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")
