"""PTX text -> Module. Covers what the CuTeDSL compiler and inline assembly emit; anything else is a PtxSyntaxError."""

import re
import struct
from collections.abc import Iterator

from tests.ptx.errors import PtxSyntaxError
from tests.ptx.ptx_types import ptx_type
from tests.ptx.syntax import (
    Addr,
    Guard,
    Imm,
    Instruction,
    Kernel,
    Module,
    Neg,
    Not,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Sym,
    Variable,
    Vec,
)

_SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|clusterid|nclusterid|cluster_n?ctaid)\.[xyz]$|%(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock64|clock_hi"
    r"|globaltimer|globaltimer_lo|globaltimer_hi|lanemask_(eq|le|lt|ge|gt)|dynamic_smem_size|total_smem_size"
    r"|cluster_ctarank|cluster_nctarank|is_explicit_cluster|n?ctaid|n?tid)$"
)
_VARIABLE = re.compile(
    r"\.(?P<space>param|shared|global|const|local)\s*(?:\.align\s+(?P<align>\d+)\s*)?(?:\.v[248]\s*)?\.(?P<type>\w+)"
    r"(?:\s*\.ptr(?:\s*\.\w+)?(?:\s*\.align\s+\d+)?)?\s+(?P<name>[\w$%.]+)\s*(?P<dims>(?:\[\d*\])*)\s*(?:=\s*(?P<init>.*))?$",
    re.S,
)
_LINKAGE = r"(?:\.(?:visible|extern|weak|common)\s+)*"


def parse(text: str) -> Module:
    """The module of a whole PTX file."""
    text = _without_comments(text)
    target = re.search(r"\.target\s+(\w+)", text)
    if target is None:
        raise PtxSyntaxError("no .target directive: this is not a PTX module")
    module = Module(target[1])
    position = 0
    for head in re.finditer(_LINKAGE + r"\.entry\s+([\w$]+)\s*(\(.*?\))?([^{;]*)\{", text, re.S):
        if head.start() < position:
            continue
        module.variables += _module_variables(text[position : head.start()])
        end = _matching_brace(text, head.end() - 1)
        module.kernels[head[1]] = _kernel(head, text[head.end() : end], text.count("\n", 0, head.end()) + 1)
        position = end + 1
    module.variables += _module_variables(text[position:])
    return module


def _without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def _matching_brace(text: str, start: int) -> int:
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start + match.start()
    raise PtxSyntaxError("unbalanced braces")


def _module_variables(text: str) -> list[Variable]:
    declarations = re.findall(_LINKAGE + r"(\.(?:shared|global|const)\b[^;]*);", text)
    return [_variable(d) for d in declarations]


def _variable(declaration: str) -> Variable:
    match = _VARIABLE.match(" ".join(declaration.split()).replace("[ ", "[").replace(" ]", "]"))
    if match is None:
        raise PtxSyntaxError(f"variable declaration not understood: {declaration!r}")
    kind = ptx_type(match["type"])
    count = 1
    for dim in re.findall(r"\[(\d*)\]", match["dims"]):
        count *= int(dim or 0)
    data = b""
    if match["init"]:
        items = [i for i in re.split(r"[{},\s]+", match["init"]) if i]
        data = b"".join((_literal(i).value & ((1 << kind.bits) - 1)).to_bytes(kind.bytes, "little") for i in items)
    return Variable(match["name"], count * kind.bytes, int(match["align"] or kind.bytes), match["space"], data)


def _kernel(head: "re.Match[str]", body: str, line: int) -> Kernel:
    kernel = Kernel(head[1])
    params = (head[2] or "()").strip()[1:-1]
    kernel.params = [_variable(p.strip()) for p in params.split(",") if p.strip()]
    threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head[3])
    if threads:
        kernel.required_threads = (int(threads[1]), int(threads[2] or 1), int(threads[3] or 1))
    _Body(kernel).read(body, line)
    return kernel


def _labels(statements: list[tuple[int, str]]) -> list[str]:
    """Labels of the scope that these statements are in, up to its end: known there before they appear."""
    found, depth = [], 0
    for _, statement in statements:
        depth += {"{": 1, "}": -1}.get(statement, 0)
        if depth < 0:
            break
        if depth == 0 and statement.endswith(":"):
            found.append(statement[:-1])
    return found


class _Body:
    """Fills a kernel from the statements between its braces."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.scopes: list[dict[str, str]] = [{}]
        self.scope_count = 0

    def read(self, body: str, line: int) -> None:
        label = ""
        statements = list(_statements(body, line))
        for index, (number, statement) in enumerate(statements):
            if statement == "{":
                self.scope_count += 1
                self.scopes.append({name: f"{name}@{self.scope_count}" for name in _labels(statements[index + 1 :])})
            elif statement == "}":
                self.scopes.pop()
            elif statement.endswith(":"):
                label = self._local(statement[:-1])
                self.kernel.labels[label] = len(self.kernel.instructions)
            elif statement.startswith(".branchtargets"):
                self.kernel.branch_targets[label] = [name.strip() for name in statement.split(None, 1)[1].split(",")]
            elif statement.startswith("."):
                self._directive(statement, number)
            else:
                self.kernel.instructions.append(self._instruction(statement, number))

    def _local(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _declare(self, name: str, kind: str) -> None:
        unique = name if len(self.scopes) == 1 else f"{name}@{self.scope_count}"
        self.scopes[-1][name] = unique
        self.kernel.registers[unique] = kind

    def _directive(self, statement: str, line: int) -> None:
        if statement.startswith(".reg"):
            match = re.match(r"\.reg\s*\.(\w+)\s+(.*)", statement, re.S)
            if match is None:
                raise PtxSyntaxError(f"line {line}: {statement!r}")
            for item in match[2].split(","):
                family = re.match(r"\s*([%$\w]+)(?:<(\d+)>)?\s*$", item)
                if family is None:
                    raise PtxSyntaxError(f"line {line}: {statement!r}")
                names = [family[1]] if family[2] is None else [f"{family[1]}{i}" for i in range(int(family[2]))]
                for name in names:
                    self._declare(name, match[1])
        elif re.match(r"\.(extern\s+)?\.?(shared|local|global|const)\b", statement):
            self.kernel.variables.append(_variable(re.sub(r"^\.extern\s+", "", statement)))
        elif not re.match(r"\.(param|pragma|loc|file|section|maxntid|minnctapersm)\b", statement):
            raise PtxSyntaxError(f"line {line}: directive not understood: {statement!r}")

    def _instruction(self, statement: str, line: int) -> Instruction:
        match = re.match(r"(?:@(!?)\s*([%$\w]+)\s+)?([\w.:]+)\s*(.*)$", statement, re.S)
        if match is None:
            raise PtxSyntaxError(f"line {line}: {statement!r}")
        guard = Guard(self._local(match[2]), match[1] == "!") if match[2] else None
        operands = tuple(self._operand(o, line) for o in _split(match[4]))
        parts = tuple(re.sub(r"::", "__", match[3]).split("."))
        return Instruction(
            tuple(p.replace("__", "::") for p in parts), operands, guard, line, " ".join(statement.split())
        )

    def _operand(self, text: str, line: int) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return Vec(tuple(self._operand(o, line) for o in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1], line)
        if text.startswith("("):
            return Vec(tuple(self._operand(o, line) for o in _split(text[1:-1])))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first, line), self._operand(second, line))
        if text == "_":
            return Sink()
        if text.startswith("!"):
            return Not(Reg(self._local(text[1:].strip())))
        name = self._local(text)
        if name in self.kernel.registers:
            return Reg(name)
        if text.startswith("-") and self._local(text[1:]) in self.kernel.registers:
            return Neg(Reg(self._local(text[1:])))
        if _SPECIAL.match(text):
            return Special(text[1:])
        if re.match(r"[-+]?(\d|\.\d)", text):
            return _literal(text)
        if re.match(r"[$\w][\w$]*$", text):
            return Sym(name)
        raise PtxSyntaxError(f"line {line}: operand not understood: {text!r}")

    def _address(self, text: str, line: int) -> Operand:
        parts = _split(text)
        if len(parts) > 1:  # tensor-map addresses [map, {coords}]
            return Vec(tuple(self._operand(p, line) for p in parts))
        match = re.match(r"\s*([%$\w]+)\s*(?:([+-])\s*(-?\w+))?\s*$", text)
        if match is None:
            raise PtxSyntaxError(f"line {line}: address not understood: [{text}]")
        offset = int(match[3], 0) if match[3] else 0
        base = self._operand(match[1], line)
        if not isinstance(base, Reg | Sym | Imm):
            raise PtxSyntaxError(f"line {line}: address not understood: [{text}]")
        return Addr(base, -offset if match[2] == "-" else offset)


def _statements(body: str, line: int) -> Iterator[tuple[int, str]]:
    """(line number, statement) for each statement, label ("name:") and scope brace."""
    position = 0
    token = re.compile(
        r"\s*(?:(?P<brace>[{}])|(?P<label>[\w$%]+)\s*:(?!:)|(?P<statement>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;))", re.S
    )
    while position < len(body):
        match = token.match(body, position)
        if match is None:
            if body[position:].strip():
                raise PtxSyntaxError(f"line {line}: not understood: {body[position:].strip()[:80]!r}")
            return
        kind = match.lastgroup or ""
        start_line = line + body.count("\n", position, match.start(kind))
        line += body.count("\n", position, match.end())
        position = match.end()
        if kind == "label":
            yield start_line, match["label"] + ":"
        elif kind == "brace":
            yield start_line, match["brace"]
        elif text := match["statement"][:-1].strip():
            yield start_line, text


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    if current.strip():
        parts.append(current)
    return parts


def _literal(text: str) -> Imm:
    if match := re.match(r"0[fF]([0-9a-fA-F]{8})$", text):
        return Imm(int(match[1], 16), 32)
    if match := re.match(r"0[dD]([0-9a-fA-F]{16})$", text):
        return Imm(int(match[1], 16), 64)
    if re.search(r"[.eE]", text) and not text.lower().startswith("0x"):
        return Imm(int.from_bytes(struct.pack("<d", float(text)), "little"), 64)
    text = text.rstrip("Uu")
    if re.match(r"-?0[0-7]+$", text):
        return Imm(int(text, 8))
    return Imm(int(text, 0))
