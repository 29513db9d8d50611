"""A copy of the product with every hook of tracing taken out of its code: what tracing costs when it is off is the difference.

Owns the surgery; decides nothing about measuring. A hook is an `if` on a trace or tracer, or the call that begins a trace.
"""

import ast
import shutil
from pathlib import Path

PACKAGES = ("protocol", "engine", "frontend", "deploy")
_NAMES = ("trace", "tracer", "traced", "trace_level")


def copy_without_tracing(root: Path, target: Path) -> int:
    """Copy the packages below `root` to `target`; returns how many hooks were cut out. Raises ValueError for none."""
    cut = 0
    for package in PACKAGES:
        shutil.copytree(root / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*(target / "frontend").glob("*.py"), target / "engine" / "wire.py"]:
        surgeon = _Surgeon()
        tree = surgeon.visit(ast.parse(path.read_text()))
        if surgeon.cut:
            path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            cut += surgeon.cut
    if not cut:
        raise ValueError(f"no hook of tracing was found below {root}")
    return cut


class _Surgeon(ast.NodeTransformer):
    def __init__(self) -> None:
        self.cut = 0

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:  # ast's name
        self.generic_visit(node)
        if not _asks_for_trace(node.test):
            return node
        self.cut += 1
        left = node.body if _is_absence(node.test) else node.orelse
        return left or [ast.Pass()]

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:  # ast's name
        self.generic_visit(node)
        if not _asks_for_trace(node.test):
            return node
        self.cut += 1
        return node.body if _is_absence(node.test) else node.orelse

    def visit_Expr(self, node: ast.Expr) -> ast.AST:  # ast's name
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Name) and called.id == "_begin_trace":
            self.cut += 1
            return ast.Pass()
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:  # ast's name
        if isinstance(node.value, ast.Call) and any(
            isinstance(one, ast.Name) and one.id == "TRACE" for one in node.value.args
        ):
            self.cut += 1
            node.value = ast.Constant(None)
        return node


def _asks_for_trace(test: ast.expr) -> bool:
    """`trace is None`, `self.trace is not None`, `server.tracer is not None`, and the engine's `trace_level > 0`."""
    if isinstance(test, ast.BoolOp):
        return any(_asks_for_trace(value) for value in test.values)
    if not isinstance(test, ast.Compare):
        return False
    left = test.left
    name = left.id if isinstance(left, ast.Name) else left.attr if isinstance(left, ast.Attribute) else ""
    return name in _NAMES


def _is_absence(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is)
