"""The WebAssembly bytes in the live page equal their assembled source."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from functools import partial

from kit.node import WEB

SIMD = 0xFD
OPCODES = {  # opcode, and the number of its immediate values
    "loop": (0x03, 1), "end": (0x0B, 0), "br_if": (0x0D, 1), "local.get": (0x20, 1), "local.set": (0x21, 1),
    "local.tee": (0x22, 1), "f32.store": (0x38, 2), "i32.const": (0x41, 1), "i32.lt_u": (0x49, 0), "i32.add": (0x6A, 0),
    "i32.sub": (0x6B, 0), "i32.shl": (0x74, 0), "f32.add": (0x92, 0),
}  # fmt: skip
SIMD_OPCODES = {"v128.load": (0x00, 2), "v128.const": (0x0C, 16), "f32x4.extract_lane": (0x1F, 1),
                "f32x4.add": (0xE4, 0), "f32x4.mul": (0xE6, 0)}  # fmt: skip
EMPTY_BLOCK = 0x40
TYPES = {"i32": 0x7F, "v128": 0x7B}
ALIGNMENTS = {"f32.store": 2, "v128.load": 4}  # as powers of two: the natural ones, which the source does not write
Instruction = tuple[str, tuple[int, ...]]


def source_instructions(text: str) -> Iterator[Instruction]:
    """The instructions of the only function, with indices instead of names."""
    names = {name: i for i, name in enumerate(re.findall(r"\((?:param|local) (\$\w+)", text))}
    body = text[text.rindex("(local") :].split("\n", 1)[1]
    for line in body.replace("))", "\nend").split("\n"):
        name, *words = line.split() or [""]
        if not name:
            continue
        if name == "loop":
            yield name, (EMPTY_BLOCK,)
        elif name == "br_if":
            yield name, (0,)  # every branch targets the innermost loop
        elif name.startswith("local."):
            yield name, (names[words[0]],)
        elif name in ALIGNMENTS:
            yield name, (ALIGNMENTS[name], int(words[0].removeprefix("offset=")) if words else 0)
        elif name == "v128.const":
            yield name, tuple(struct.pack("<4i", *map(int, words[1:])))
        else:
            yield name, tuple(map(int, words))


def decoded_instructions(code: bytes) -> Iterator[Instruction]:
    names = {opcode: name for name, (opcode, _) in OPCODES.items()}
    simd_names = {opcode: name for name, (opcode, _) in SIMD_OPCODES.items()}
    counts = {name: count for name, (_, count) in (OPCODES | SIMD_OPCODES).items()}
    rest = iter(code)
    for byte in rest:
        name = simd_names[leb128(rest)] if byte == SIMD else names[byte]
        read = partial(next, rest) if name == "v128.const" else partial(leb128, rest)
        yield name, tuple(read() for _ in range(counts[name]))


def leb128(code: Iterator[int]) -> int:
    """The next number, in groups of seven bits."""
    value, shift = 0, 0
    for byte in code:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value


def test_bytes_equal_the_assembled_source() -> None:
    text = re.sub(r";;.*", "", (WEB / "page" / "product.wat").read_text("utf-8"))
    script = (WEB / "page" / "weights.js").read_text("utf-8")
    constant = re.search(r"const PRODUCT =([^;]*);", script)
    assert constant is not None
    module = base64.b64decode("".join(re.findall(r'"(.*)"', constant[1])))
    parameters, locals_ = re.findall(r"\(param \$\w+ (\w+)", text), re.findall(r"\(local \$\w+ (\w+)", text)
    header = b"\0asm\1\0\0\0"
    types = bytes([1, 4 + len(parameters), 1, 0x60, len(parameters), *(TYPES[name] for name in parameters), 0])
    imports, functions, exports = (
        b"\x02\x08\x01\x01m\x01m\x02\x00\x01",
        b"\x03\x02\x01\x00",
        b"\x07\x05\x01\x01f\x00\x00",
    )
    assert '(import "m" "m" (memory 1))' in text and '(func (export "f")' in text
    start = header + types + imports + functions + exports
    assert module.startswith(start)
    assert locals_ == sorted(locals_)
    code = iter(module[len(start) :])
    assert (next(code), leb128(code), next(code)) == (
        10,
        len(module) - len(start) - 3,
        1,
    )  # one section with a function
    assert leb128(code) == len(module) - len(start) - 6
    declared = bytes([2, locals_.count("i32"), TYPES["i32"], locals_.count("v128"), TYPES["v128"]])
    assert bytes(next(code) for _ in declared) == declared
    assert list(decoded_instructions(bytes(code))) == list(source_instructions(text))
