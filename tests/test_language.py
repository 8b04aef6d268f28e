"""Rules of language: how a docstring begins, the names of variables, and decimals with a leading zero."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("fusion_compiler", "benchmarks", "examples", "tests")
# A first sentence has a subject or an imperative. With one of these words it is a fragment.
FRAGMENTS = {"of", "those", "that", "what", "under", "has", "which", "where", "by"}
# So is a participle without a noun: "Found by name", "Recorded, and not". "Compiled graphs" has its noun, a
# gerund ("Choosing a schedule") is one, and "Read" or "Cut" may be imperatives.
IRREGULAR = "found|made|known|given|told|kept|held|taken|written|drawn|seen|sent|built|left|chosen|shown"
NO_NOUN = (
    "a|after|again|along|also|an|and|as|at|because|before|beside|between|but|by|for|from|if|in|into|like|no|nor|not"
    "|of|on|once|only|or|over|so|than|that|the|through|to|twice|under|until|when|where|which|while|with|without"
)
PARTICIPLE = re.compile(rf"(?:\w+ed|{IRREGULAR})(?:[,.;]|$|\s+(?:{NO_NOUN})\b)", re.IGNORECASE)
# A name says which thing it holds: splits, candidates, plan. An import keeps the library's name, such as
# `given` of hypothesis; only an import with "as" chooses one.
NAMES = {"found", "made", "own", "known", "given", "whole", "told", "there", "then"}
DECIMAL = re.compile(r"(?<![\w.\])])\.\d+\b")


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable, argument, attribute, function and class that is bound."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case _:
                pass


def docstrings(tree: ast.AST) -> list[tuple[int, str]]:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [(node.body[0].lineno, text) for node in nodes if (text := ast.get_docstring(node))]


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def is_fragment(docstring: str) -> bool:
    """True if the docstring begins with a word of `FRAGMENTS`, or with a participle without a noun."""
    return re.split(r"\W", docstring, maxsplit=1)[0].lower() in FRAGMENTS or bool(PARTICIPLE.match(docstring))


def faults(source: str) -> list[str]:
    """Return "line: fault" for each docstring, name and decimal of a source that breaks a rule."""
    tree = ast.parse(source)
    texts = docstrings(tree)
    wrong = [(line, text) for line, text in texts if is_fragment(text)]
    wrong += [(line, f"a variable called {name}") for line, name in bound_names(tree) if name in NAMES]
    if DECIMAL.search(source):
        prose = [*texts, *comments(source)]
        wrong += [(line, f"{n} has no leading zero") for line, text in prose for n in DECIMAL.findall(text)]
    return [f"{line}: {' '.join(fault.split())}" for line, fault in sorted(wrong)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_sources_obey_the_rules(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    wrong = [f"{file.relative_to(ROOT)}:{fault}" for file in files for fault in faults(file.read_text())]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        *(f'"""{word.title()} a graph is read."""' for word in sorted(FRAGMENTS)),
        '"""Found by its name."""',
        '"""Recorded, and not."""',
        '"""Compiled without a GPU."""',
        'class Plan:\n    """Which kernels there are."""',
        'def f():\n    """Of a launch."""',
        "found = 1",
        "a, (given, b) = c",
        "def own(): ...",
        "def f(made): ...",
        "f = lambda *told: told",
        "for there in x: ...",
        "[then for then in x]",
        "if (known := x): ...",
        "self.whole = 1",
        "class Plan:\n    known: int",
        "import x as own",
        "try: ...\nexcept E as given: ...",
        "with x as told: ...",
        "match x:\n    case [*given]: ...",
        "x = 1  # at least .92 of it",
        '"""Keep a factor of .5."""',
    ],
)
def test_a_fault_is_seen(source: str) -> None:
    assert len(faults(source)) == 1


def test_plain_sources_pass() -> None:
    source = '''
        """Compiled graphs mean what the model means; a bar is 0.92, `x.1` and `[0].5` are no decimals."""
        from hypothesis import given
        def kernels_of(plan):
            """Read a plan, and return its kernels."""
            return plan.found(known=1) or "own"  # torch's own
        class Kernel:
            """Every kernel has a name."""
    '''
    assert not faults("\n".join(line[8:] for line in source.splitlines()))
