"""
Ways to use the package wrongly, or in bad luck, and what the user is told: see test_failures.py.

A category is a module with a list `CASES`, and a line below.
"""

from . import commands, comparing, data, disk, evaluating, files, resuming, servers, settings

CATEGORIES = {
    "commands": commands.CASES,
    "settings": settings.CASES,
    "data": data.CASES,
    "evaluating": evaluating.CASES,
    "comparing": comparing.CASES,
    "files": files.CASES,
    "resuming": resuming.CASES,
    "servers": servers.CASES,
    "disk": disk.CASES,
}
