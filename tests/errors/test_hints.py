"""Every error of the package is raised here, by a call that a user could write, and has a hint that helps."""

from __future__ import annotations

import pytest

from tests.errors.exempt import EXEMPT
from tests.errors.row import Row, hint_of, places_of, raised
from tests.errors.sites import sites
from tests.errors.table import ROWS


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_error_says_what_to_do(row: Row) -> None:
    error = raised(row)
    assert type(error) is row.error or (isinstance(error, row.error) and type(error).__name__ == "ExpressionError"), (
        error
    )
    assert row.hint in hint_of(error), str(error)
    assert hint_of(error).strip(" .") not in ("", "None")


def test_every_error_of_the_package_is_in_the_table() -> None:
    places = {place for row in ROWS for place in places_of(raised(row))}
    missing = [
        str(site)
        for site in sites()
        if not any(file == site.file and site.first <= line <= site.last for file, line in places)
        and (site.file, site.function) not in EXEMPT
    ]
    assert missing == []


def test_what_is_exempt_raises_still() -> None:
    raising = {(site.file, site.function) for site in sites()}
    assert [place for place in EXEMPT if place not in raising] == []
    assert all(len(reason) > 10 for reason in EXEMPT.values())
