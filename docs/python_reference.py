#!/usr/bin/env python3
"""Writes docs/python.md, the reference of the Python package, out of its docstrings: docs/python_reference.py > docs/python.md

Nothing is imported: neither torch nor the built library is needed."""
import ast
import pathlib
import re
import sys

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "python/src/rejoin"
# By module: what is public, and of a class which methods; none: all without an underscore.
MODULES = {
    "rejoin": None,  # its __all__, as is rejoin.torch's
    "rejoin.torch": {"Batches": ()},
    "rejoin.transformers": {"RejoinCallback": (), "RejoinMixin": (), "RejoinTrainer": ()},
    "rejoin.lightning": {"RejoinCallback": ()},
    "rejoin.distributed": {"ProcessGroup": ("get_reconfigure_handle", "reconfigure"), "Options": None},
    "rejoin.torchft": {"RejoinTransport": ()},
    "rejoin.log": {"to_logging": None, "set_level": None},
}
NATIVE = {
    "version": ("version() -> str", "The library's release."),
    "position_step": ("position_step(position: str) -> int", "The step at which this position of a checkpoint was taken."),
}


def tree_of(module):
    path = PACKAGE.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")), path.read_text(encoding="utf-8").split("\n")


def text_of(node):
    """A docstring as Markdown: its list of arguments becomes one."""
    lines, arguments = (ast.get_docstring(node) or "").split("\n"), False
    for i, line in enumerate(lines):
        if line == "Args:":
            lines[i], arguments = "", True
        elif arguments and (found := re.match(r"    (\w+): (.*)", line)):
            lines[i] = f"- `{found[1]}`: {found[2]}"
        elif arguments and line.startswith("        "):
            lines[i] = "  " + line.strip()
    return "\n".join(lines).strip()


def arguments_of(node, is_method):
    given = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0].args
    given.args = given.args[1:] if is_method else given.args
    return ast.unparse(given)


def show_function(node, is_method=False):
    kinds = [ast.unparse(one) for one in node.decorator_list]
    result = "" if node.returns is None else ast.unparse(node.returns)
    shown = node.name if "property" in kinds else f"{node.name}({arguments_of(node, is_method)})"
    if "contextmanager" in kinds or result.startswith("AbstractContextManager["):
        shown = f"with {shown}" + " as bool" * result.endswith("[bool]")
    elif result != "None":
        shown += f" -> {result}"
    return f"**`{shown}`**\n\n{text_of(node)}\n"


def show_class(node, lines, methods):
    made = next((one for one in node.body if getattr(one, "name", "") == "__init__"), None)
    yield f"### {node.name}\n"
    if made is not None:
        yield f"**`{node.name}({arguments_of(made, True)})`**\n"
    yield text_of(node) + "\n"
    if made is not None and ast.get_docstring(made):
        yield text_of(made) + "\n"
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and not one.target.id.startswith("_")]
    if "Args:" not in (ast.get_docstring(node) or ""):
        for one in fields:
            said = lines[one.lineno - 1].partition("  # ")[2]
            yield f"- `{one.target.id}: {ast.unparse(one.annotation)}`" + (f": {said}" if said else "")
        if fields:
            yield ""
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_") and (methods is None or one.name in methods):
            yield show_function(one, is_method=True)


def public_names(tree):
    for one in tree.body:
        if isinstance(one, ast.Assign) and getattr(one.targets[0], "id", "") == "__all__":
            return [element.value for element in one.value.elts]
    return []


def definition_of(name, tree, lines):
    """The function or class of this name, in its module or where that imports it from."""
    for one in tree.body:
        if isinstance(one, (ast.FunctionDef, ast.ClassDef)) and one.name == name:
            return one, lines
        if isinstance(one, ast.ImportFrom) and any(alias.name == name for alias in one.names):
            return definition_of(name, *tree_of(one.module))
    raise SystemExit(f"python_reference.py: nothing defines {name}")


def show_module(module, given):
    tree, lines = tree_of(module)
    names = public_names(tree) or list(given)
    yield f"## {module}\n\n{text_of(tree)}\n"
    errors = []
    for name in names:
        if name in NATIVE and module == "rejoin":
            yield "**`{}`**\n\n{}\n".format(*NATIVE[name])
            continue
        node, where = definition_of(name, tree, lines)
        if isinstance(node, ast.FunctionDef):
            yield show_function(node)
        elif any(ast.unparse(base) in ("RejoinError", "Exception") for base in node.bases):
            errors.append(node)
        else:
            yield from show_class(node, where, (given or {}).get(name))
    if errors:
        yield f"### Errors\n\n{text_of(tree_of('rejoin.errors')[0])}\n\n| class | what it is |\n|---|---|"
        for node in errors:
            also = [ast.unparse(base) for base in node.bases if ast.unparse(base) not in ("RejoinError", "Exception")]
            yield f"| `{node.name}` | {' '.join(text_of(node).split())}" + (f" (`{also[0]}`, too)" if also else "") + " |"
        yield ""


def show_run():
    tree, _ = tree_of("rejoin.run")
    yield f"## rejoin-run\n\n{text_of(tree)}\n\n| option | |\n|---|---|"
    commands, _ = tree_of("rejoin._run_commands")
    for call in ast.walk(next(one for one in commands.body if getattr(one, "name", "") == "run_parser")):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
            told = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
            name = call.args[0].value
            if name.startswith("--") and "help" in told:
                said = told["help"].replace("%(default)s", str(told.get("default")))
                yield f"| `{name}` | {said} |"
    yield ""


def page():
    parts = ["# Python reference\n\nWhat is public in the package, out of its docstrings: `docs/python_reference.py` "
             "writes this page. [PyTorch](pytorch.md) says how it is used, step by step.\n"]
    for module, given in MODULES.items():
        parts += show_module(module, given)
    parts += show_run()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
