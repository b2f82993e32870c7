"""Arguments of Triton kernels in groups: a stale compiled kernel must not be taken for one of today's."""

import ast
from pathlib import Path

import pytest

from sartor.kernels import triton
from sartor.kernels.triton import groups

FOLDER = Path(triton.__file__).parent
GROUPS = {name: fields for name, fields in vars(groups).items() if hasattr(fields, "_fields") and name != "NamedTuple"}
MADE = [
    (file.name, call)
    for file in sorted(FOLDER.glob("*.py"))
    for call in ast.walk(ast.parse(file.read_text()))
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in GROUPS
]


@pytest.mark.parametrize(("file", "call"), MADE, ids=lambda x: x if isinstance(x, str) else f"{x.func.id} {x.lineno}")
def test_fields_are_given_by_name(file, call):
    """Triton's cache keys on the text of functions, not on the order of these fields."""
    assert not call.args
    assert {word.arg for word in call.keywords} <= set(GROUPS[call.func.id]._fields)


def test_what_is_left_out_is_nothing():
    """Nor does it key on defaults."""
    assert set(GROUPS) == {"Tensors", "Numbers", "Config"}
    assert len(MADE) >= 11
    for group in GROUPS.values():
        assert set(group._field_defaults.values()) <= {None}
