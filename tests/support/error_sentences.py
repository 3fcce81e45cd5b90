"""Finds every error sentence of outrider in its source: the arguments with which error classes are constructed.

Values that are filled in become "…". ``ast`` finds the sentence where an error is constructed (raised at once, or returned
by a function), if it is a literal, an f-string, a sum or a conditional expression of these, or a constant of the module. A
sentence that is passed on from another error (``str(error)``) is found where that error is constructed, if it is ours.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("runner", "workers", "kernels")
# Error classes whose sentences reach the user although they do not derive from OutriderError.
OTHERS = {"BadConstraint", "BadShape", "RowError", "LeftOutError", "KernelsUnavailable", "Unfit"}


class Sentence(NamedTuple):
    file: str
    line: int
    error: str
    text: str


class Module(NamedTuple):
    file: str
    tree: ast.Module
    nodes: list[ast.AST]


@cache
def modules() -> list[Module]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = [ast.parse(path.read_text()) for path in files]
    return [
        Module(path.relative_to(ROOT).as_posix(), tree, list(ast.walk(tree)))
        for path, tree in zip(files, trees, strict=True)
    ]


def error_classes() -> set[str]:
    """The names of OutriderError and all its subclasses."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }
    found = {"OutriderError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found | OTHERS


@cache
def sentences() -> list[Sentence]:
    classes = error_classes()
    found = []
    for file, tree, nodes in modules():
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in nodes:
            if isinstance(node, ast.Call) and node.args and _name(node.func) in classes:
                for text in texts(node.args[0], constants):
                    found.append(Sentence(file, node.lineno, _name(node.func), " ".join(text.split())))
    return found


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def texts(node: ast.expr, constants: dict[str, ast.expr]) -> list[str]:
    """The texts that an expression may have; none where the text is made elsewhere."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        rights = texts(node.right, constants) or ["…"]
        return [left + right for left in texts(node.left, constants) or ["…"] for right in rights]
    if isinstance(node, ast.IfExp):
        return [*texts(node.body, constants), *texts(node.orelse, constants)]
    if isinstance(node, ast.Name) and node.id in constants:
        return texts(constants[node.id], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return [re.sub(r"\{[^}]*\}", "…", text) for text in texts(node.func.value, constants)]
    return []


def literals() -> list[str]:
    """Every string of the code, so that a quotation in the docs is also found among warnings and notes."""
    found = []
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                found += [" ".join(text.split()) for text in texts(node, {})]
    return found
