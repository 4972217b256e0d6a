"""PTX texts made wrong at random: the input of the parser's fuzz tests."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from tests.emulator.device import entry
from tests.emulator.mutation import blackwell, hopper

TOKEN = re.compile(r"[A-Za-z_$%.][\w$.:]*|0[xXfFdD][0-9a-fA-F]+|\d+|\s+|.", re.DOTALL)
NUMBERS = ["0", "1", "31", "32", "33", "64", "255", "4095", "65536", "2147483648", "4294967295", "18446744073709551615"]
NUMBERS += [
    "-1",
    "-9223372036854775808",
    "99999999999999999999999",
    "0x",
    "0xFFFFFFFFFFFFFFFFFF",
    "0f3F800000",
    "0f3F",
    "1e400",
]
PIECES = [
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ",",
    ";",
    ":",
    "@",
    "|",
    "!",
    "%",
    "<",
    ">",
    "<4294967295>",
    "//",
    "/*",
    "*/",
    '"',
    "\0",
]
PIECES += [
    ".reg .b32 %x<99999999>;",
    ".local .b8 big[4294967295];",
    ".shared .align 3 .b8 odd[7];",
    ".param .u64 p",
    "ret;",
    "\xff",
]

SCALAR = """
  mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd2, %rd1;
  mad.lo.s32 %r2, %r1, 3, %r1; fma.rn.ftz.f32 %f1, %f2, 0f3F800000, %f3; setp.lt.and.s32 %p1, %r2, 5, %p2;
  @%p1 bra skip; { .reg .b32 %inner; mov.b32 %inner, 4; add.s32 %r3, %inner, %r2; }
  mov.b64 %rd4, {%r1, %r2}; mov.b64 {%r3, _}, %rd4; shfl.sync.bfly.b32 %r4|%p3, %r3, 1, 31, -1;
  atom.global.add.u32 %r5, [%rd2+4], %r4; st.global.v2.b32 [%rd2+-8], {%r4, %r5};
skip:
  selp.b32 %r6, %r4, 0x1F, !%p1; lop3.b32 %r7, %r6, %r5, %r4, 0xE8; bar.sync 0; cvt.rn.bf16x2.f32 %r8, %f1, %f2;
"""


def seeds() -> list[str]:
    """Well-formed texts to start from: the mutation suite's kernels and one with scalar instructions of every form."""
    return [
        blackwell.text(blackwell.lines()),
        hopper.text(hopper.lines()),
        entry(SCALAR),
        entry(
            SCALAR, block=64, module=".global .align 8 .b8 table[16] = {1, 2, 3, 4};\n.const .f32 half = 0f3F000000;"
        ),
    ]


def _shorten(text: str, rng: random.Random) -> str:
    """Keeps the head and a stretch of the body without its branches, so that most inputs are small and nearly right."""
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if line.startswith("{")), 0) + 1
    if rng.random() < 0.05 or len(lines) < 60:
        return text
    declared = next((i for i in range(start, len(lines)) if ".reg" not in lines[i]), start)
    first = rng.randrange(declared, len(lines))
    body = [line for line in lines[first : first + rng.randrange(4, 40)] if " bra " not in line and line.strip() != "}"]
    return "\n".join([*lines[:declared], *body, "}", ""])


def _change(tokens: list[str], others: list[str], rng: random.Random) -> None:
    """One random change of a token list, in place."""
    at = rng.randrange(len(tokens))
    kind = rng.randrange(8)
    if kind == 0:
        del tokens[at : at + rng.randrange(1, 4)]
    elif kind == 1:
        tokens.insert(at, tokens[rng.randrange(len(tokens))])
    elif kind == 2:
        tokens[at] = rng.choice(NUMBERS)
    elif kind == 3:
        tokens.insert(at, rng.choice(PIECES))
    elif kind == 4:
        tokens[at] = rng.choice(others)
    elif kind == 5:
        other = rng.randrange(len(tokens))
        tokens[at], tokens[other] = tokens[other], tokens[at]
    elif kind == 6:
        word = tokens[at]
        cut = rng.randrange(len(word) + 1)
        tokens[at] = word[:cut] + rng.choice([".", ".f32", ".x4", "::", "%", chr(rng.randrange(1, 256))]) + word[cut:]
    else:
        tokens[at:] = tokens[at : at + rng.randrange(1, 30)]


def broken_texts(count: int, seed: int) -> Iterator[bytes]:
    """`count` texts, the same for the same seed; every hundredth is deeply nested or very long in one place."""
    rng = random.Random(seed)
    texts = seeds()
    others = [token for text in texts for token in TOKEN.findall(text) if not token.isspace()]
    for number in range(count):
        tokens = TOKEN.findall(_shorten(rng.choice(texts), rng))
        for _ in range(rng.choice([1, 1, 1, 2, 3, 8, 30])):
            if tokens:
                _change(tokens, others, rng)
        if number % 100 == 99:
            tokens.insert(
                len(tokens) // 2, rng.choice(["{", "[", "(", "-", "!", "x", "{%r1,"]) * rng.choice([50, 5000, 100_000])
            )
        yield "".join(tokens).encode("latin-1")
