"""Every sentence with which outrider ends, as it stands in the code: what the error classes are made with.

What is filled in stands as "…". A sentence is found by ``ast`` where an error is made (raised at once, or returned by a
function), if it is a literal, an f-string, a sum of them, one of two by a condition, or a name of the module that is such a
text. What a sentence is made of elsewhere (``str(error)``) is found there, if that is an error of ours too.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("runner", "workers", "kernels")
# Those that reach a user as a sentence without deriving from OutriderError: of a row, of a conversation, of the kernels.
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
    """OutriderError and all that derive from it, by name."""
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
    """What an expression may say; nothing where it is made elsewhere."""
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
    """Every text of the code, so that what a page quotes can be looked for among warnings and notes as well."""
    found = []
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                found += [" ".join(text.split()) for text in texts(node, {})]
    return found
