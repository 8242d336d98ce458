"""The page of results, and the part of its table that README shows, are those of the kept runs."""

import re
from pathlib import Path

from benchmarks.results import summary
from benchmarks.results.families import FAMILIES, further_runs, kept_families

ROOT = Path(__file__).parents[1]


def test_the_page_has_the_table_and_readme_a_part_of_it():
    """Of README, each task that it has a row for: GRPO, FR3E and the difference."""
    table = summary.table(kept_families(), further_runs("shipped", FAMILIES))
    assert table.markdown() in (ROOT / "docs" / "results.md").read_text()
    shown = ("GRPO as TRL ships it", "GRPO, best variant", "FR3E (default)", "FR3E − GRPO as TRL ships it")
    columns = [table.header.index(name) for name in shown]
    by_task = {row[0]: [row[i] for i in columns] for row in table.rows}
    shown = [line.strip("| ").split(" | ") for line in (ROOT / "README.md").read_text().splitlines()]
    shown = [cells for cells in shown if (task := re.match(r"`\w+`", cells[0])) and task[0] in by_task]
    assert len(shown) >= 3
    for cells in shown:
        assert cells[1:] == by_task[cells[0].split(",")[0]]
