"""
Ways to use the package wrongly, or in bad luck, and what the user is told: see test_failures.py.

A category is a module with a list `CASES`.
"""

from . import api, commands, data, evaluating, files, resuming, servers

MODULES = [commands, api, data, evaluating, files, resuming, servers]
CATEGORIES = {module.__name__.rpartition(".")[2]: module.CASES for module in MODULES}
