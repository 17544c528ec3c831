"""What the linker does not check: one definition for each name, and headers that can be included in any order."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="an installed package has no sources")
HEADERS = sorted(CSRC.glob("*.h"))
#: Definitions that stand at the left margin, which is where a namespace's own are.
DEFINITION = re.compile(
    r"^(?:template <[^\n]*>\n)?"
    r"(?:(?:struct|class|enum class|enum) (?P<type>\w+)[^;\n]*\{"
    r"|(?=\w)(?!using |typedef |return |template )(?:[\w:<>,&* ]+?[&* ])(?P<function>\w+)\([^;{}]*\)[^;{}]*\{"
    r"|constexpr [\w:<>,* ]+ (?P<constant>\w+)(?:\[\])? ?=)",
    flags=re.M,
)


def definitions():
    found = defaultdict(set)
    for header in HEADERS:
        text = re.sub(r"__attribute__\(\(\w+\)\) ", "", header.read_text())
        for match in DEFINITION.finditer(text):
            found[match["type"] or match["function"] or match["constant"]].add(header.name)
    return found


def test_the_definitions_are_found():
    found = definitions()
    assert found["load_mask"] == {"simd.h"}
    assert found["Bool"] == {"dtype.h"}
    assert found["kGrain"] == {"common.h"}


def test_a_name_is_defined_in_one_header():
    """Inline functions of one name in two headers are two bodies of one symbol, of which the linker keeps any."""
    twice = {name: sorted(headers) for name, headers in definitions().items() if len(headers) > 1}
    assert twice == {}


@pytest.mark.parametrize("header", HEADERS, ids=[header.name for header in HEADERS])
def test_a_header_has_one_guard_of_its_own(header):
    text = header.read_text()
    if "namespace maskwise::MASKWISE_TARGET {" not in text:
        return
    guard = f"MASKWISE_{header.stem.upper()}_H"
    assert f"#if defined({guard}) == defined(MASKWISE_TARGET_TOGGLE)" in text
    assert text.count(guard) == 3
    assert "#pragma once" not in text
