"""
Ways to use the package wrongly, or in bad luck, and what the user is told: see test_failures.py.

A category is a module with a list `CASES`, and a line below.
"""

from . import api, commands, data, disk, evaluating, files, resuming, servers, settings

CATEGORIES = {
    "commands": commands.CASES,
    "api": api.CASES,
    "settings": settings.CASES,
    "data": data.CASES,
    "evaluating": evaluating.CASES,
    "files": files.CASES,
    "resuming": resuming.CASES,
    "servers": servers.CASES,
    "disk": disk.CASES,
}
