"""From a Program to CUDA C++: the same expressions the reference evaluates, as source text.

The text defines `Aux` (what the mods read), `AUX_VALUES` (its values, from a kernel's parameters), and `keep`, `rows`,
`score`, each taking (b, h, q, kv, x, n) with x the Aux and n the lengths. What is read for every pair of query and key
may be brought near (`near.cuh`): `Near` holds it for one pair, and is one more argument then. `score_and_rise` also
leaves the derivative by the score where its last argument says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch

from sartor.kernels.cuda import brought
from sartor.kernels.cuda.params import Params
from sartor.mods.expr import Expr
from sartor.mods.program import Aux, Program

TYPES = {
    "torch.float32": "float", "torch.float64": "double", "torch.bool": "bool", "torch.uint8": "u8",
    "torch.int8": "signed char", "torch.int16": "short", "torch.int32": "int", "torch.int64": "i64",
    "torch.float16": "u16", "torch.bfloat16": "u16",
}  # fmt: skip
_WIDEN = {"torch.float16": "Half16<false>::widen", "torch.bfloat16": "Half16<true>::widen", "torch.float64": "float"}
_CALLS = {
    "/": "divide", "floor_divide": "floor_divide", "abs": "absolute",
    "maximum": "maximum", "minimum": "minimum", "tanh": "tanh_exact", "where": "where", "exp": "expf", "exp2": "exp2f",
    "log": "logf", "sqrt": "square_root", "sigmoid": "sigmoid", "truncate": "truncate",
}  # fmt: skip
_SCORE_CALLS = _CALLS | {"/": "ratio"}
_LIMITS = {"q": "imin(q, n.seqlen_q - 1)", "k": "imin(kv, n.seqlen_kv - 1)"}
NUMBERS = {"n": "int", "f": "float"}


def source(program: Program, near: tuple[int, ...] = (), half: bool = False, tiles: bool = True) -> str:
    """The generated text; an empty program has an empty Aux. `near` are the aux values that are brought near, by
    `tiles` of `near.cuh` or in a kernel's own way; `half` says that scores are of 16-bit operands, for which a coarser
    tanh will do."""
    fields = parameters(program)
    lines = ["struct Aux {", *(f"  {kind} {name};" for name, kind in fields.items()), "};"]
    lines += ["#define AUX_VALUES " + ", ".join(fields)]
    lines += _near(program, near) if tiles else _pair(program, near)
    position = "int b, int h, int q"
    rest = "const Aux& x, const Shape& n"
    calls = _SCORE_CALLS | ({"tanh": "tanh_half"} if half else {})
    for y, own in (("", ()), (", const Near& y", near)):
        if program.keep is not None:
            value = _text(program.keep, program, own)
            lines += [f"DEVICE bool keep({position}, int kv, {rest}{y}) {{ return {value}; }}"]
        if program.score is not None:
            value = _text(program.score, program, own, calls)
            lines += [f"DEVICE float score(float s, {position}, int kv, {rest}{y}) {{ return {value}; }}"]
        if program.score is not None and (near or not y):
            taken = f"float s, {position}, int kv, {rest}, float& rise{y}"
            lines += [f"DEVICE float score_and_rise({taken}) {{", *_rise(program, calls, own), "}"]
    for name, at, spans in (("rows", "q", program.rows), ("cols", "kv", program.cols)):
        if spans is not None:
            values = ", ".join(f"{'narrow' if _is_wide(e, program) else 'int'}({_text(e, program)})" for e in spans)
            lines += [f"DEVICE Span {name}(int b, int h, int {at}, {rest}) {{ return {{{values}}}; }}"]
    return "\n".join([*lines, ""])


def _near(program: Program, near: tuple[int, ...]) -> list[str]:
    """`Near`; bytes of the tiles and strips of a warp's 16 rows; `bring` for a row of its tiles, `load_near` for a
    warpgroup's rows where the producer brings them, or `map_near` for a warp's where the copy engine does;
    `bring_strips`; `look` for two neighbours in them, or for what a thread has of sixteen keys' scores; and for a mask
    that is a bool tensor within limits, where that is and the limits."""
    fields, bring, load, maps, strips, look, block = [], [], [], [], [], [], []
    sizes, strip_sizes = ["0"], ["0"]
    for i in near:
        spec = program.aux[i]
        kind = "float" if spec.dims else TYPES[spec.dtype]
        tile = "NearStrip<BLOCK_N>" if spec.dims else f"NearTile<{kind}, BLOCK_N>"
        fields += [f"{kind} a{i};"]
        at = f"{'strip' if spec.dims else 'tile'} + {' + '.join(strip_sizes if spec.dims else sizes)}"
        look += [f"{tile}::pair({at}, row, key, y[0].a{i}, y[1].a{i});"]
        put = f"UNROLL for (int i = 0; i < 8; i++) y[i].a{i} = of[i];"
        block += [f"{{ {kind} of[8]; {tile}::block({at}, key, of); {put} }}"]
        if spec.dims:
            read = brought.strip(program, i)
            assert read is not None
            value = f"[&](int kv, int q) {{ return {_text(read, program)}; }}"
            strips += [f"{tile}::bring(to + {' + '.join(strip_sizes)}, {value}, first, q - first);"]
            strip_sizes += [f"{tile}::bytes"]
            continue
        row = " + ".join([f"x.a{i}", *_steps(i, spec.pattern[:-1])])
        bring += [f"{tile}::bring(to + {' + '.join(sizes)}, {row}, first, n.seqlen_kv);"]
        of_row = f"[&](int r) {{ const int q = query(r), h = head(r); return {row}; }}"
        load += [f"{tile}::load<RAGGED, NEAR_BYTES>(to + {' + '.join(sizes)}, even, {of_row}, first, n.seqlen_kv);"]
        if brought.is_small(spec):
            place = f"key, query, head * t.near{i}_by_head, batch * t.near{i}_by_item"
            maps += [f"{tile}::map(to + {' + '.join(sizes)}, &t.near{i}, bar, {place});"]
        sizes += [f"{tile}::bytes"]
    tail = "int first, const Aux& x, const Shape& n"
    place = f"int b, int h, int q, {tail}"
    return [
        f"struct Near {{ {' '.join(fields)} }};",
        f"constexpr int NEAR_BYTES = {' + '.join(sizes)};",
        f"enum : int {{ STRIP_BYTES = {' + '.join(strip_sizes)} }};",
        f"DEVICE void bring(u32 to, {place}) {{ {' '.join(bring)} }}",
        "template <class Head, class Query>",
        f"DEVICE void load_near(u32 to, bool even, int b, Head head, Query query, {tail}) {{ {' '.join(load)} }}",
        "template <class Params> DEVICE void map_near(",
        f"  u32 to, u32 bar, int batch, int head, int query, int key, const Params& t) {{ {' '.join(maps)} }}",
        f"DEVICE void bring_strips(u32 to, {place}) {{ {' '.join(strips)} }}",
        f"DEVICE void look(Near (&y)[2], u32 tile, u32 strip, int row, int key) {{ {' '.join(look)} }}",
        f"DEVICE void look(Near (&y)[8], u32 tile, u32 strip, int key) {{ {' '.join(block)} }}",
        *_seen(program, near),
    ]


def _seen(program: Program, near: tuple[int, ...]) -> list[str]:
    """`SEEN_AT`, where a warp's rows of the bool tensor are among its tiles, and `seen_within`, a row's limits."""
    found = brought.seen(program, near)
    if found is None:
        return []
    before = [f"NearTile<{TYPES[program.aux[i].dtype]}, BLOCK_N>::bytes" for i in near[: near.index(found.tensor)]]
    ends = []
    for least, limits, nearer in (("0", found.lo, "imax"), ("n.seqlen_kv", found.hi, "imin")):
        for e in limits:
            text = _text(e, program)
            least = f"{nearer}({least}, {'narrow' if _is_wide(e, program) else 'int'}({text}))"
        ends += [least]
    position = "int b, int h, int q, const Aux& x, const Shape& n"
    return [
        f"#define SEEN_AT {' + '.join(['0', *before])}",
        f"DEVICE Span seen_within({position}) {{ return {{{', '.join(ends)}, 0, 0}}; }}",
    ]


def _pair(program: Program, near: tuple[int, ...]) -> list[str]:
    """`Near`; what takes values that are at hand: of a bool tensor (`put_seen`), of one of 16 bits (`put_added`)."""
    seen, added = seen_and_added(program, near)
    lines = [f"struct Near {{ {' '.join(f'{TYPES[program.aux[i].dtype]} a{i};' for i in near)} }};"]
    if seen is not None:
        lines += [f"DEVICE void put_seen(Near& y, bool value) {{ y.a{seen} = value; }}"]
    if added is not None:
        lines += [f"DEVICE void put_added(Near& y, u16 value) {{ y.a{added} = value; }}"]
    return lines


def seen_and_added(program: Program, near: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Among values that are near the one that is a bool tensor and the one of 16 bits."""
    bools = [i for i in near if program.aux[i].dtype == "torch.bool"]
    return next(iter(bools), None), next((i for i in near if i not in bools), None)


def _rise(program: Program, calls: Mapping[str, str], near: tuple[int, ...]) -> list[str]:
    """Statements: the score, and its derivative in `rise`. What both are made of is made once: compilers see no
    equality in what is written in PTX."""
    assert program.score is not None
    assert program.dscore is not None
    known: dict[str, str] = {}
    lines = []
    for e in reversed([*program.score.nodes(), *program.dscore.nodes()]):  # the inner ones first
        if e.op == "tanh" and e.text() not in known:
            lines += [f"  const float t{len(known)} = {_text(e, program, near, calls, known)};"]
            known[e.text()] = f"t{len(known)}"
    rise, value = (_text(e, program, near, calls, known) for e in (program.dscore, program.score))
    return [*lines, f"  rise = {rise};", f"  return {value};"]


@lru_cache(maxsize=1024)
def passed(params: Params, program: Program) -> Params:
    """Parameters, and after them those that carry the aux values: for a program the same ones each time."""
    return params.followed_by(parameters(program))


def parameters(program: Program) -> dict[str, str]:
    """The kernel parameters that carry the aux values: C++ types by name."""
    found: dict[str, str] = {}
    for i, spec in enumerate(program.aux):
        found[f"a{i}"] = NUMBERS.get(spec.pattern) or f"const {TYPES[spec.dtype]}* __restrict__"
        found |= {f"a{i}_{dim}": "i64" for dim in _dims(spec)}
    return found


def arguments(aux: tuple[Any, ...], program: Program) -> dict[str, Any]:
    """Aux values by the names of `parameters`."""
    found: dict[str, Any] = {}
    for i, (value, spec) in enumerate(zip(aux, program.aux, strict=True)):
        if isinstance(value, torch.Tensor):
            sizes = value.shape if spec.dims else [value.stride("bhqk".index(c)) for c in _dims(spec)]  # type: ignore[arg-type]
            found |= {
                f"a{i}": value.data_ptr(),
                **{f"a{i}_{dim}": n for dim, n in zip(_dims(spec), sizes, strict=True)},
            }
            continue
        if spec.pattern == "n" and not -(2**31) <= value < 2**31:
            raise ValueError(
                f"an integer that a mask or score reads must have 32 bits on GPUs, got {value}: give it as a tensor"
            )
        found[f"a{i}"] = value
    return found


def of_tensors(aux: tuple[Any, ...]) -> list[str]:
    """The names among `arguments` of the tensors' addresses; calls of one key differ in nothing else."""
    return [f"a{i}" for i, value in enumerate(aux) if isinstance(value, torch.Tensor)]


def split(aux: tuple[Any, ...], program: Program) -> tuple[dict[str, Any], dict[str, str]]:
    """`arguments` that calls of one key share; and the names of the others, by themselves."""
    found, tensors = arguments(aux, program), of_tensors(aux)
    return {name: value for name, value in found.items() if name not in tensors}, {name: name for name in tensors}


def _dims(spec: Aux) -> Iterable[int | str]:
    """What its sizes or strides are called."""
    return () if spec.pattern in NUMBERS else range(spec.dims) if spec.dims else _strided(spec.pattern)


def _strided(pattern: str) -> str:
    return "" if pattern == "one" else "".join(c for c in pattern if c.islower())


def _text(
    e: Expr, program: Program, near: tuple[int, ...] = (), calls: Mapping[str, str] = _CALLS,
    known: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """`known` are names of variables by the text of what they hold."""
    if known and e.text() in known:
        return known[e.text()]
    if e.op == "const":
        value = e.args[0]
        return str(value).lower() if isinstance(value, bool) else _number(value)
    if e.op == "sym":
        return str(e.args[0])
    if e.op == "aux":
        return _read(e.args[0], program, near)
    if e.op == "gather":
        return _gather(e, program, [_text(a, program, near, calls, known) for a in e.args[1:]], near)
    parts = [_text(a, program, near, calls, known) for a in e.args]
    if e.op in calls:
        return f"{calls[e.op]}({', '.join(parts)})"
    if e.op in ("neg", "invert"):
        return f"({'-' if e.op == 'neg' else '~'} {parts[0]})"  # which may begin with a sign of its own
    return f"({parts[0]} {'/' if e.op == '//' else e.op} {parts[1]})"


def _gather(e: Expr, program: Program, indices: list[str], near: tuple[int, ...]) -> str:
    """An element of a table, which is dense; a near one is of the one index by which it is read."""
    i, place = e.args[0].args[0], ""
    if i in near:
        return f"y.a{i}"
    for dim, text in enumerate(indices):
        at = f"place({text}, x.a{i}_{dim})"
        place = f"({place} * x.a{i}_{dim} + {at})" if place else at
    return f"{_WIDEN.get(program.aux[i].dtype, '')}(x.a{i}[{place}])"


def _is_wide(e: Expr, program: Program) -> bool:
    """Whether an integer that it reads has 64 bits."""
    if e.op == "const":
        return isinstance(e.args[0], int) and _number(e.args[0]).endswith("ll")
    if e.op == "aux":
        spec: Aux = program.aux[e.args[0]]
        return spec.dtype == "torch.int64"
    return any(_is_wide(a, program) for a in e.args if isinstance(a, Expr))


def _number(value: int | float) -> str:
    if isinstance(value, int):
        return str(value) if abs(value) < 2**31 else f"{value}ll"
    if value != value:
        return "(INF - INF)"
    return f"{'-' if value < 0 else ''}INF" if abs(value) == float("inf") else f"{value!r}f"


def _read(i: int, program: Program, near: tuple[int, ...]) -> str:
    spec = program.aux[i]
    if spec.pattern in NUMBERS:
        return f"x.a{i}"
    if i in near:
        return f"{_WIDEN.get(spec.dtype, '')}(y.a{i})"
    place = "0" if spec.pattern == "one" else " + ".join(_steps(i, spec.pattern))
    return f"{_WIDEN.get(spec.dtype, '')}(x.a{i}[{place}])"


def _steps(i: int, pattern: str) -> list[str]:
    """The offsets of a place in an aux value, dim by dim."""
    positions = {c: _LIMITS.get(c, c) for c in pattern.lower()}
    return [f"i64({positions[c.lower()]}) * x.a{i}_{c}" if c.islower() else positions[c.lower()] for c in pattern]
