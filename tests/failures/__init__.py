"""Ways to use the package wrongly, or in bad luck, by category, and what the user is told: see test_failures.py."""

from . import api, commands, data, evaluating, files, resuming, servers

MODULES = [commands, api, data, evaluating, files, resuming, servers]
CATEGORIES = {module.__name__.rpartition(".")[2]: module.CASES for module in MODULES}
